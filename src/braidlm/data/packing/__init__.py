"""From text to packed token files: shards, worker processes, assembly."""
