"""From plain data to a typed architecture: the registry of parts, strict decoding, inheritance."""
