"""What a budget means for the data there is: said before a training begins, so that nobody finds it out afterwards."""

from collections.abc import Sequence

from braidlm.core.console import count
from braidlm.data.loading.streams import TokenStream
from braidlm.training.amounts import Amount


def repetition(budget: Amount, streams: Sequence[TokenStream]) -> str | None:
    """That a budget is more than there is, and how often the data is shown; None if it is not, or is in steps."""
    if budget.unit == "steps":
        return None
    there = sum(stream.words if budget.unit == "words" else len(stream) for stream in streams)
    if budget.count <= there:
        return None
    return (
        f"The budget is {budget} and the data has {count(there)}: epochs repeat, and the data is shown "
        f"{budget.count / there:.1f} times on average."
    )
