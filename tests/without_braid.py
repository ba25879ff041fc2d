"""The beginning of a script for a process in which braidlm cannot be imported."""

WITHOUT_BRAID = """
import sys

class NoBraid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "braidlm":
            raise ImportError("braidlm is not installed here")

sys.meta_path.insert(0, NoBraid())
try:
    import braidlm
except ImportError:
    pass
else:
    raise SystemExit("braidlm can be imported: this test would prove nothing")
"""
