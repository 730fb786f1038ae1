"""Data parallelism behind one interface: shard, reduce, step, named state out."""
