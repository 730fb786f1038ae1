"""Every kernel against float64: inputs, rivals and bounds, in the interpreter or on a GPU."""
