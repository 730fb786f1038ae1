"""Release formats: block FP8, MXFP4 and INT4 weights, with their scales beside them."""
