"""Log-decays of Kimi Delta Attention."""
