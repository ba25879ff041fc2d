"""Word problems about counting: adding, taking away, multiplying, sharing, and several steps of these."""

from braidlm.data.corpora.maths.scene import FRIEND, HOLDERS, ITEMS, Parts, ProblemKind, Scene, are


def together(s: Scene) -> Parts:
    """x + y."""
    a, b, item, x, y = s.a, s.b, s.choice(ITEMS), s.size(), s.size()
    verb = s.choice(("has", "found", "collected", "counted"))
    ask = {
        "has": "do they have",
        "found": "did they find",
        "collected": "did they collect",
        "counted": "did they count",
    }
    question = s.either(
        f"{a} {verb} {item.of(x)}. {b} {verb} {item.of(y)}.", f"{a} {verb} {item.of(x)} and {b} {verb} {item.of(y)}."
    )
    total = s.choice(("together", "in all", "altogether"))
    solution = f"Add the two: {x} + {y} = {x + y} {item.many}."
    return f"{question} How many {item.many} {ask[verb]} {total}?", solution, x + y


def more(s: Scene) -> Parts:
    """x - y, as a comparison."""
    a, b, item, y = s.a, s.b, s.choice(ITEMS), s.size()
    gap = s.randint(1, 60)
    x = y + gap
    question = s.either(
        f"{a} has {item.of(x)}. {b} has {item.of(y)}. How many more {item.many} does {a} have than {b}?",
        f"{a} picked {item.of(x)}, but {b} picked only {item.of(y)}. How many fewer {item.many} did {b} pick?",
    )
    return question, f"The difference is {x} - {y} = {item.of(gap)}.", gap


def give(s: Scene) -> Parts:
    """x - y, as something given away."""
    a, b, item, left, y = s.a, s.b, s.choice(ITEMS), s.randint(0, 90), s.size()
    x = left + y
    question = s.either(
        f"{a} has {item.of(x)}. {a.He} gives {item.of(y)} to {b}.",
        f"{a} had {item.of(x)} and gave {y} of them to {b}.",
    )
    ask = f"How many {item.many} does {a} have left?"
    return f"{question} {ask}", f"{a} keeps {x} - {y} = {item.of(left)}.", left


def at_first(s: Scene) -> Parts:
    """The unknown at the start: y + left."""
    a, b, item, y, left = s.a, s.b, s.choice(ITEMS), s.size(), s.size()
    question = s.either(
        f"{a} gave {item.of(y)} to {b} and has {item.of(left)} left. How many did {a} have at first?",
        f"After {a} gave {b} {item.of(y)}, {a} still had {item.of(left)}. How many did {a} have before?",
    )
    return question, f"Put the {item.many} together again: {y} + {left} = {item.of(y + left)}.", y + left


def groups(s: Scene) -> Parts:
    """x * y."""
    a, b, item, box, x, y = s.a, s.b, s.choice(ITEMS), s.choice(HOLDERS), s.randint(2, 15), s.randint(2, 30)
    question = s.either(
        f"{a} helps {b} to pack. They fill {box.of(x)} with {item.of(y)} each.",
        f"{a} gives {b} {box.of(x)}. Each {box.one} has {item.of(y)} in it.",
        f"{a} and {b} have {box.of(x)}. There are {item.of(y)} in every {box.one}.",
    )
    solution = f"There are {box.of(x)} with {item.of(y)} each, so there are {x} * {y} = {x * y} {item.many}."
    return f"{question} How many {item.many} are there in all?", solution, x * y


def share(s: Scene) -> Parts:
    """x / y without a remainder."""
    a, b, item, y, each = s.a, s.b, s.choice(ITEMS), s.randint(2, 12), s.randint(1, 40)
    x = y * each
    question = s.either(
        f"{a} and {b} share {item.of(x)} equally among {FRIEND.of(y)}. How many {item.many} does each friend get?",
        f"{a} has {item.of(x)}. {b} puts them into {y} equal groups. How many {item.many} are in each group?",
    )
    return question, f"Divide the {item.many} equally: {x} / {y} = {item.of(each)}.", each


def left_over(s: Scene) -> Parts:
    """The remainder of x / y."""
    a, b, item, box, y, full = s.a, s.b, s.choice(ITEMS), s.choice(HOLDERS), s.randint(3, 12), s.randint(2, 20)
    rest = s.randint(0, y - 1)
    x = y * full + rest
    question = f"{a} has {item.of(x)}. {a.He} puts {y} into each {box.one} and gives the rest to {b}."
    solution = f"{a} can fill {box.of(full)}, which takes {full} * {y} = {full * y} {item.many}."
    ask = s.either(f"How many {item.many} does {b} get?", f"How many {item.many} are left for {b}?")
    return f"{question} {ask}", f"{solution} That leaves {x} - {full * y} = {item.of(rest)} for {b}.", rest


def boxes_needed(s: Scene) -> Parts:
    """x / y, rounded up."""
    a, b, item, box, y, full = s.a, s.b, s.choice(ITEMS), s.choice(HOLDERS), s.randint(4, 12), s.randint(2, 20)
    rest = s.randint(1, y - 1)
    x = y * full + rest
    question = (
        f"{a} and {b} want to pack {item.of(x)}. {y} {item.many} fit into one {box.one}. "
        f"How many {box.many} do they need for all the {item.many}?"
    )
    solution = (
        f"{full} full {box.many} hold {full} * {y} = {full * y} {item.many}. "
        f"Then {x} - {full * y} = {rest} {are(rest)} left, so they need one more {box.one}: {full} + 1 = {full + 1}."
    )
    return question, solution, full + 1


def boxes_given(s: Scene) -> Parts:
    """Two steps: x * y - z."""
    a, b, item, box, x, y = s.a, s.b, s.choice(ITEMS), s.choice(HOLDERS), s.randint(2, 12), s.randint(3, 24)
    z = s.randint(1, x * y - 1)
    left = x * y - z
    question = s.either(
        f"{a} has {box.of(x)} with {item.of(y)} each. {a.He} gives {item.of(z)} to {b}.",
        f"{a} bought {box.of(x)}. Each {box.one} holds {item.of(y)}. Then {a.he} gave {b} {item.of(z)}.",
    )
    solution = (
        f"At first {a} has {x} * {y} = {x * y} {item.many}. "
        f"After giving {z} away, {a.he} has {x * y} - {z} = {item.of(left)}."
    )
    return f"{question} How many {item.many} does {a} have left?", solution, left


def three_steps(s: Scene) -> Parts:
    """x + y * z - w."""
    a, b, item, box = s.a, s.b, s.choice(ITEMS), s.choice(HOLDERS)
    x, y, z = s.randint(1, 40), s.randint(2, 9), s.randint(2, 15)
    w = s.randint(1, x + y * z - 1)
    left = x + y * z - w
    question = (
        f"{a} has {item.of(x)}. {a.He} buys {box.of(y)} with {item.of(z)} each and then gives {item.of(w)} to {b}. "
        f"How many {item.many} does {a} have now?"
    )
    solution = (
        f"The {box.many} hold {y} * {z} = {y * z} {item.many}. With the first {item.of(x) if x > 1 else item.one}, "
        f"{a.he} has {x} + {y * z} = {x + y * z}. After the gift, {a.he} has {x + y * z} - {w} = {item.of(left)}."
    )
    return question, solution, left


def times_as_many(s: Scene) -> Parts:
    """y * x + x."""
    a, b, item, x, y = s.a, s.b, s.choice(ITEMS), s.randint(2, 40), s.randint(2, 9)
    question = s.either(
        f"{a} has {item.of(x)}. {b} has {y} times as many.",
        f"{a} found {item.of(x)}, and {b} found {y} times as many as {a}.",
    )
    solution = f"{b} has {y} * {x} = {y * x} {item.many}. Together they have {x} + {y * x} = {x + y * x} {item.many}."
    return f"{question} How many {item.many} do they have together?", solution, x + y * x


def rows(s: Scene) -> Parts:
    """x * y + z, seats and guests."""
    a, b, thing = s.a, s.b, s.choice(("chairs", "plants", "desks", "tiles", "bricks", "trees"))
    x, y, z = s.randint(3, 20), s.randint(3, 20), s.randint(2, 40)
    question = (
        f"{a} puts {thing} into {x} rows with {y} in each row. {b} adds {z} more. How many {thing} are there now?"
    )
    solution = f"The rows have {x} * {y} = {x * y} {thing}. Now there are {x * y} + {z} = {x * y + z} {thing}."
    return question, solution, x * y + z


COUNTING: tuple[ProblemKind, ...] = (
    together, more, give, at_first, groups, share, left_over, boxes_needed, boxes_given, three_steps, times_as_many,
    rows,
)  # fmt: skip
