"""SwiGLU activation."""
