"""Floor 3: bridges to and from other model formats. A new format is a new file in `formats/`."""
