"""The correlations of SciPy, imported when one is first computed: SciPy is part of the `eval` extra."""

import numpy as np

from braidlm.core.errors import BraidError


def check_scipy() -> None:
    """Raise an error before any model runs if SciPy is not installed."""
    try:
        import scipy  # noqa: F401
    except ImportError:
        raise BraidError("this task needs scipy", todo="`pip install 'braidlm[eval]'` gets it.") from None


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation; 0, where SciPy gives NaN, if either side is constant."""
    return _correlation("pearsonr", x, y)


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's rank correlation; 0 if either side is constant."""
    return _correlation("spearmanr", x, y)


def _correlation(name: str, x: np.ndarray, y: np.ndarray) -> float:
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    check_scipy()
    from scipy import stats

    return float(getattr(stats, name)(x, y).statistic)
