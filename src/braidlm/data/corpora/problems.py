"""The word problems of the built-in corpora: adding, sharing, money, time and shapes, with worked solutions."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from braidlm.data.corpora.material import Person, Rng


@dataclass(frozen=True)
class Noun:
    """A thing to count."""

    one: str
    many: str

    def of(self, count: int) -> str:
        """'1 apple', '2 apples', '0 apples'."""
        return f"{count} {self.one if count == 1 else self.many}"


def nouns(text: str) -> tuple[Noun, ...]:
    """Nouns with a regular plural, or with both forms separated by a slash."""
    return tuple(
        Noun(*one.split("/"))
        if "/" in one
        else Noun(one, one + ("es" if one.endswith(("s", "x", "ch", "sh")) else "s"))
        for one in text.split()
    )


ITEMS = nouns(
    "apple pencil marble sticker book card shell button coin stamp orange cookie pear flower stone crayon "
    "bead ribbon balloon cupcake nut peach plum lemon block badge ticket photo star cherry/cherries "
    "postcard candle eraser carrot muffin seed leaf/leaves"
)
HOLDERS = nouns("box bag basket jar packet bowl tray drawer")
GOODS = nouns("notebook pen cup plate toy kite scarf/scarves hat ball puzzle comic brush candle")
DEAR = nouns("bike tent guitar camera chair table desk telescope coat jacket lamp clock sled violin")
DOLLAR, YEAR, HOUR, MINUTE, DAY, WEEK, METER, PAGE, FRIEND = nouns("dollar year hour minute day week meter page friend")


class Scene(Rng):
    """The random choices of one problem."""

    def either(self, *texts: str) -> str:
        """One of several ways to say it."""
        return self.choice(texts)

    def size(self) -> int:
        """A count: often small, sometimes in the hundreds."""
        return self.randint(2, self.choice((20, 50, 100, 400)))


Parts = tuple[str, str, int]
"""Question, solution, answer."""
ProblemKind = Callable[[Scene, Person, Person], Parts]
"""Makes a problem of two people, of whom the first is named first."""


def together(s: Scene, a: Person, b: Person) -> Parts:
    """x + y."""
    item, x, y = s.choice(ITEMS), s.size(), s.size()
    did, verb = s.choice((("has", "have"), ("found", "find"), ("collected", "collect"), ("counted", "count")))
    question = s.either(
        f"{a} {did} {item.of(x)}. {b} {did} {item.of(y)}.", f"{a} {did} {item.of(x)} and {b} {did} {item.of(y)}."
    )
    ask = f"How many {item.many} {'do' if did == 'has' else 'did'} they {verb}"
    total = s.choice(("together", "in all", "altogether"))
    return f"{question} {ask} {total}?", f"Add the two: {x} + {y} = {x + y} {item.many}.", x + y


def more(s: Scene, a: Person, b: Person) -> Parts:
    """x - y, as a comparison."""
    item, y, gap = s.choice(ITEMS), s.size(), s.randint(1, 60)
    x = y + gap
    question = s.either(
        f"{a} has {item.of(x)}. {b} has {item.of(y)}. How many more {item.many} does {a} have than {b}?",
        f"{a} picked {item.of(x)}, but {b} picked only {item.of(y)}. How many fewer {item.many} did {b} pick?",
    )
    return question, f"The difference is {x} - {y} = {item.of(gap)}.", gap


def give(s: Scene, a: Person, b: Person) -> Parts:
    """x - y, as something given away."""
    item, left, y = s.choice(ITEMS), s.randint(0, 90), s.size()
    x = left + y
    question = s.either(
        f"{a} has {item.of(x)}. {a.He} gives {item.of(y)} to {b}.", f"{a} had {item.of(x)} and gave {y} of them to {b}."
    )
    return f"{question} How many {item.many} does {a} have left?", f"{a} keeps {x} - {y} = {item.of(left)}.", left


def at_first(s: Scene, a: Person, b: Person) -> Parts:
    """The unknown at the start: y + left."""
    item, y, left = s.choice(ITEMS), s.size(), s.size()
    question = s.either(
        f"{a} gave {item.of(y)} to {b} and has {item.of(left)} left. How many did {a} have at first?",
        f"After {a} gave {b} {item.of(y)}, {a} still had {item.of(left)}. How many did {a} have before?",
    )
    return question, f"Put the {item.many} together again: {y} + {left} = {item.of(y + left)}.", y + left


def groups(s: Scene, a: Person, b: Person) -> Parts:
    """x * y."""
    item, box, x, y = s.choice(ITEMS), s.choice(HOLDERS), s.randint(2, 15), s.randint(2, 30)
    question = s.either(
        f"{a} helps {b} to pack. They fill {box.of(x)} with {item.of(y)} each.",
        f"{a} gives {b} {box.of(x)}. Each {box.one} has {item.of(y)} in it.",
        f"{a} and {b} have {box.of(x)}. There are {item.of(y)} in every {box.one}.",
    )
    solution = f"There are {box.of(x)} with {item.of(y)} each, so there are {x} * {y} = {x * y} {item.many}."
    return f"{question} How many {item.many} are there in all?", solution, x * y


def share(s: Scene, a: Person, b: Person) -> Parts:
    """x / y without a remainder."""
    item, y, each = s.choice(ITEMS), s.randint(2, 12), s.randint(1, 40)
    x = y * each
    question = s.either(
        f"{a} and {b} share {item.of(x)} equally among {FRIEND.of(y)}. How many {item.many} does each friend get?",
        f"{a} has {item.of(x)}. {b} puts them into {y} equal groups. How many {item.many} are in each group?",
    )
    return question, f"Divide the {item.many} equally: {x} / {y} = {item.of(each)}.", each


def left_over(s: Scene, a: Person, b: Person) -> Parts:
    """The remainder of x / y."""
    item, box, y, full = s.choice(ITEMS), s.choice(HOLDERS), s.randint(3, 12), s.randint(2, 20)
    rest = s.randint(0, y - 1)
    x = y * full + rest
    question = f"{a} has {item.of(x)}. {a.He} puts {y} into each {box.one} and gives the rest to {b}."
    solution = f"{a} can fill {box.of(full)}, which takes {full} * {y} = {full * y} {item.many}."
    ask = s.either(f"How many {item.many} does {b} get?", f"How many {item.many} are left for {b}?")
    return f"{question} {ask}", f"{solution} That leaves {x} - {full * y} = {item.of(rest)} for {b}.", rest


def boxes_needed(s: Scene, a: Person, b: Person) -> Parts:
    """x / y, rounded up."""
    item, box, y, full = s.choice(ITEMS), s.choice(HOLDERS), s.randint(4, 12), s.randint(2, 20)
    rest = s.randint(1, y - 1)
    x, are = y * full + rest, "is" if rest == 1 else "are"
    question = f"{a} and {b} want to pack {item.of(x)}. {y} {item.many} fit into one {box.one}. "
    solution = f"{full} full {box.many} hold {full} * {y} = {full * y} {item.many}. "
    solution += f"Then {x} - {full * y} = {rest} {are} left, so they need one more {box.one}: {full} + 1 = {full + 1}."
    return f"{question}How many {box.many} do they need for all the {item.many}?", solution, full + 1


def boxes_given(s: Scene, a: Person, b: Person) -> Parts:
    """Two steps: x * y - z."""
    item, box, x, y = s.choice(ITEMS), s.choice(HOLDERS), s.randint(2, 12), s.randint(3, 24)
    z = s.randint(1, x * y - 1)
    left = x * y - z
    question = s.either(
        f"{a} has {box.of(x)} with {item.of(y)} each. {a.He} gives {item.of(z)} to {b}.",
        f"{a} bought {box.of(x)}. Each {box.one} holds {item.of(y)}. Then {a.he} gave {b} {item.of(z)}.",
    )
    solution = f"At first {a} has {x} * {y} = {x * y} {item.many}. "
    solution += f"After giving {z} away, {a.he} has {x * y} - {z} = {item.of(left)}."
    return f"{question} How many {item.many} does {a} have left?", solution, left


def three_steps(s: Scene, a: Person, b: Person) -> Parts:
    """x + y * z - w."""
    item, box, x, y, z = s.choice(ITEMS), s.choice(HOLDERS), s.randint(1, 40), s.randint(2, 9), s.randint(2, 15)
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


def times_as_many(s: Scene, a: Person, b: Person) -> Parts:
    """y * x + x."""
    item, x, y = s.choice(ITEMS), s.randint(2, 40), s.randint(2, 9)
    question = s.either(
        f"{a} has {item.of(x)}. {b} has {y} times as many.",
        f"{a} found {item.of(x)}, and {b} found {y} times as many as {a}.",
    )
    solution = f"{b} has {y} * {x} = {y * x} {item.many}. Together they have {x} + {y * x} = {x + y * x} {item.many}."
    return f"{question} How many {item.many} do they have together?", solution, x + y * x


def rows(s: Scene, a: Person, b: Person) -> Parts:
    """x * y + z, seats and guests."""
    thing = s.choice(("chairs", "plants", "desks", "tiles", "bricks", "trees"))
    x, y, z = s.randint(3, 20), s.randint(3, 20), s.randint(2, 40)
    question = f"{a} puts {thing} into {x} rows with {y} in each row. {b} adds {z} more."
    solution = f"The rows have {x} * {y} = {x * y} {thing}. Now there are {x * y} + {z} = {x * y + z} {thing}."
    return f"{question} How many {thing} are there now?", solution, x * y + z


def change(s: Scene, a: Person, b: Person) -> Parts:
    """Money back: paid - x * price."""
    good, x, price = s.choice(GOODS), s.randint(1, 9), s.randint(1, 20)
    cost = x * price
    paid = s.choice([bill for bill in (5, 10, 20, 50, 100, 200) if bill > cost][:3])
    each = f"for {DOLLAR.of(price)}{' each' * (x > 1)}"
    question = s.either(
        f"{a} buys {good.of(x)} {each} as a present for {b}. {a.He} pays with {DOLLAR.of(paid)}.",
        f"{a} goes to the shop with {b}. {a.He} buys {good.of(x)} {each} and pays with {DOLLAR.of(paid)}.",
    )
    solution = f"The cost is {x} * {price} = {DOLLAR.of(cost)}. The change is {paid} - {cost} = "
    return f"{question} How many dollars does {a} get back?", f"{solution}{DOLLAR.of(paid - cost)}.", paid - cost


def saving(s: Scene, a: Person, b: Person) -> Parts:
    """Still missing: price - weeks * x."""
    good, x, weeks, missing = s.choice(DEAR), s.randint(2, 15), s.randint(2, 12), s.randint(1, 40)
    saved = x * weeks
    price = saved + missing
    question = (
        f"{a} wants to buy a {good.one} for {b}. It costs {DOLLAR.of(price)}. "
        f"{a.He} saves {DOLLAR.of(x)} every week for {WEEK.of(weeks)}. How many more dollars does {a.he} need?"
    )
    solution = f"{a} saves {weeks} * {x} = {DOLLAR.of(saved)}. {a.He} needs {price} - {saved} = "
    return question, f"{solution}{DOLLAR.of(missing)} more.", missing


def same_price(s: Scene, a: Person, b: Person) -> Parts:
    """From one price to another: total / x * y."""
    good, x, y, price = s.choice(GOODS), s.randint(2, 9), s.randint(1, 11), s.randint(2, 20)
    y += y >= x
    question = f"{a} pays {DOLLAR.of(x * price)} for {good.of(x)}. {b} buys {good.of(y)} at the same price. "
    solution = f"One {good.one} costs {x * price} / {x} = {DOLLAR.of(price)}. {b} pays {y} * {price} = "
    return f"{question}How many dollars does {b} pay?", f"{solution}{DOLLAR.of(y * price)}.", y * price


def distance(s: Scene, a: Person, b: Person) -> Parts:
    """speed * time."""
    hours = s.randint(1, 9)
    modes = (("walk", 3, 6), ("ride their bikes", 9, 22), ("go by train", 40, 160), ("go by boat", 8, 35))
    mode, low, high = s.choice(modes)
    speed = s.randint(low, high)
    question = s.either(
        f"{a} and {b} {mode} for {HOUR.of(hours)}. They travel {speed} kilometers every hour. How far do they go?",
        f"{a} and {b} {mode} at {speed} kilometers per hour. How far do they go in {HOUR.of(hours)}?",
    )
    return question, f"The distance is {speed} * {hours} = {speed * hours} kilometers.", speed * hours


def travel_time(s: Scene, a: Person, b: Person) -> Parts:
    """distance / speed."""
    speed = s.randint(4, 110)
    hours = s.randint(1, 3 if speed < 7 else 9)
    mode = "walks" if speed < 7 else "rides a bike" if speed < 26 else "drives with the family"
    question = f"{a} {mode} to visit {b}, who lives {speed * hours} kilometers away. "
    ask = s.either(f"How many hours does the trip take {a}?", "How many hours is the trip?")
    solution = f"The time is {speed * hours} / {speed} = {HOUR.of(hours)}."
    return f"{question}The speed is {speed} kilometers per hour. {ask}", solution, hours


def part(s: Scene, a: Person, b: Person) -> Parts:
    """A fraction of a whole number."""
    item, below, unit = s.choice(ITEMS), s.randint(3, 10), s.randint(1, 25)
    above = s.randint(2, below - 1)
    whole = below * unit
    question = s.either(
        f"{a} has {item.of(whole)}. {a.He} gives {above}/{below} of them to {b}. How many does {b} get?",
        f"{a} shows {b} {item.of(whole)}. {above}/{below} of them are red. How many {item.many} are red?",
    )
    solution = f"1/{below} of the {item.many} is {whole} / {below} = {unit}. "
    return question, f"{solution}So {above}/{below} is {above} * {unit} = {above * unit} {item.many}.", above * unit


def percent(s: Scene, a: Person, b: Person) -> Parts:
    """A price after a discount."""
    good, rate = s.choice(DEAR), s.choice((5, 10, 20, 25, 30, 40, 50, 60, 75))
    step = {5: 20, 25: 4, 50: 2, 75: 4, 20: 5, 40: 5, 60: 5}.get(rate, 10)
    price = step * s.randint(1, 200 // step)
    off = price * rate // 100
    question = (
        f"{a} wants a {good.one} that costs {DOLLAR.of(price)}. {b} tells {a.him} that today it is {rate} percent off. "
        f"How many dollars does {a} pay today?"
    )
    solution = (
        f"{rate} percent of {price} in two steps: {price} * {rate} = {price * rate} and {price * rate} / 100 = {off}. "
        f"The new price is {price} - {off} = {DOLLAR.of(price - off)}."
    )
    return question, solution, price - off


def average(s: Scene, a: Person, b: Person) -> Parts:
    """The mean of three or four numbers."""
    count, mean = s.randint(3, 4), s.randint(6, 60)
    values = [s.randint(max(1, mean - 12), mean + 12) for _ in range(count - 1)]
    values.append(mean * count - sum(values))
    if values[-1] < 1:  # the last value must be positive; equal values always have this mean
        values = [mean] * count
    totals = list(accumulate(values))
    sums = ", ".join(f"{x} + {y} = {x + y}" for x, y in zip(totals, values[1:], strict=False))
    listed = ", ".join(map(str, values[:-1])) + f" and {values[-1]}"
    what = s.choice(("read", "wrote"))
    question = f"{a} tells {b} how many pages {a.he} {what} on {DAY.of(count)}: {listed}. "
    solution = f"Add the pages: {sums}. The average is {totals[-1]} / {count} = {PAGE.of(mean)}."
    return f"{question}What is the average number of pages per day?", solution, mean


def perimeter(s: Scene, a: Person, b: Person) -> Parts:
    """2 * (x + y)."""
    y = s.randint(2, 60)
    x = y + s.randint(0, 40)
    place, half = s.choice(("garden", "field", "yard", "park")), x + y
    question = f"{a} and {b} build a fence around a {place}. The {place} is {METER.of(x)} long and {METER.of(y)} wide. "
    solution = f"A long and a short side are {x} + {y} = {half} meters. All four sides are 2 * {half} = "
    return f"{question}How many meters of fence do they need?", f"{solution}{2 * half} meters.", 2 * half


def area(s: Scene, a: Person, b: Person) -> Parts:
    """x * y."""
    y = s.randint(2, 30)
    x = y + s.randint(0, 30)
    place, work = s.choice((("a wall", "paint"), ("a floor", "sweep"), ("a lawn", "mow"), ("an ice rink", "clean")))
    tall = "high" if work == "paint" else "wide"
    question = f"{a} and {b} {work} {place} that is {METER.of(x)} long and {METER.of(y)} {tall}. "
    solution = f"The area is {x} * {y} = {x * y} square meters."
    return f"{question}How many square meters do they {work}?", solution, x * y


def ages(s: Scene, a: Person, b: Person) -> Parts:
    """x + y + z."""
    x, y, z = s.randint(4, 40), s.randint(1, 15), s.randint(2, 20)
    question = f"{a} is {YEAR.of(x)} old. {b} is {YEAR.of(y)} older than {a}. How old will {b} be in {YEAR.of(z)}?"
    solution = f"Now {b} is {x} + {y} = {YEAR.of(x + y)} old. In {YEAR.of(z)}, {b} will be {x + y} + {z} = {x + y + z}."
    return question, solution, x + y + z


def calendar(s: Scene, a: Person, b: Person) -> Parts:
    """weeks * 7 + days."""
    weeks, days = s.randint(1, 51), s.randint(1, 6)
    event = s.choice(("birthday", "school play", "holiday", "concert", "first race"))
    question = f"{a} counts the days until {b}'s {event}. It is in {WEEK.of(weeks)} and {DAY.of(days)}. "
    solution = f"The weeks have {weeks} * 7 = {weeks * 7} days. In all it is {weeks * 7} + {days} = "
    answer = weeks * 7 + days
    return f"{question}How many days is that?", f"{solution}{answer} days.", answer


def clock(s: Scene, a: Person, b: Person) -> Parts:
    """Minutes between two times of one day."""
    start, hours, early, late = s.randint(1, 8), s.randint(1, 4), 5 * s.randint(0, 5), 5 * s.randint(6, 11)
    act = s.choice(("play", "read", "paint", "bake", "work in the garden"))
    question = f"{a} and {b} {act} from {start}:{early:02d} to {start + hours}:{late:02d}. How many minutes is that?"
    span, rest = hours * 60, late - early
    solution = (
        f"From {start}:{early:02d} to {start + hours}:{early:02d} there are {hours} * 60 = {span} minutes. "
        f"Then {late} - {early} = {MINUTE.of(rest)} more pass. In all it is {span} + {rest} = {span + rest} minutes."
    )
    return question, solution, span + rest


def sequence(s: Scene, a: Person, b: Person) -> Parts:
    """The next number of a pattern."""
    first, step, count = s.randint(0, 60), s.randint(2, 25), s.randint(4, 5)
    *terms, following = (first + step * i for i in range(count + 1))
    listed = ", ".join(map(str, terms))
    question = s.either(
        f"{a} writes down a pattern for {b}: {listed}. What number comes next?",
        f"{a} counts in equal steps: {listed}. {b} wants to say the next number. What is it?",
    )
    solution = f"Each step is {terms[1]} - {first} = {step}. The next number is {terms[-1]} + {step} = {following}."
    return question, solution, following


def doubling(s: Scene, a: Person, b: Person) -> Parts:
    """x doubled three times."""
    item, x = s.choice(ITEMS), s.randint(1, 60)
    days = s.choice(("Monday, Tuesday, Wednesday and Thursday", "Tuesday, Wednesday, Thursday and Friday"))
    first, *after = days.replace(" and", ",").split(", ")
    question = f"{a} and {b} collect {item.many} on {days}. On {first} they find {x}, and on each day after that they "
    question += f"find twice as many as on the day before. How many {item.many} do they find on {after[-1]}?"
    steps = ". ".join(f"On {day} they find 2 * {x * 2**i} = {x * 2 ** (i + 1)}" for i, day in enumerate(after))
    return question, f"{steps}.", x * 8


def teamwork(s: Scene, a: Person, b: Person) -> Parts:
    """(x + y) * hours."""
    item, x, y, hours = s.choice(ITEMS), s.randint(2, 30), s.randint(2, 30), s.randint(2, 9)
    act, both = s.choice(("pack", "sort", "wash", "count")), x + y
    question = f"{a} can {act} {item.of(x)} in one hour, and {b} can {act} {y}. "
    question += f"How many {item.many} can they {act} together in {HOUR.of(hours)}?"
    solution = f"In one hour they {act} {x} + {y} = {both}. In {HOUR.of(hours)} they {act} {both} * {hours} = "
    return question, f"{solution}{both * hours}.", both * hours


ONE_STEP: tuple[ProblemKind, ...] = (together, more, give, at_first, groups, share)
KINDS: tuple[ProblemKind, ...] = (
    *ONE_STEP, left_over, boxes_needed, boxes_given, three_steps, times_as_many, rows, change, saving, same_price,
    distance, travel_time, part, percent, average, perimeter, area, ages, calendar, clock, sequence, doubling, teamwork,
)  # fmt: skip
"""All kinds, in the order that decides which document is of which kind."""
