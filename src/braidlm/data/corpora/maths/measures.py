"""Word problems about measures: money, distances, time, ages, parts of a whole, shapes and patterns."""

from braidlm.data.corpora.maths.scene import (
    DAY,
    DEAR,
    DOLLAR,
    GOODS,
    HOUR,
    ITEMS,
    METER,
    MINUTE,
    PAGE,
    WEEK,
    YEAR,
    Parts,
    ProblemKind,
    Scene,
)

BILLS = (5, 10, 20, 50, 100, 200)


def change(s: Scene) -> Parts:
    """Money back: paid - x * price."""
    a, b, good, x, price = s.a, s.b, s.choice(GOODS), s.randint(1, 9), s.randint(1, 20)
    cost = x * price
    paid = s.choice([bill for bill in BILLS if bill > cost][:3])
    each = f"for {DOLLAR.of(price)} each" if x > 1 else f"for {DOLLAR.of(price)}"
    question = s.either(
        f"{a} buys {good.of(x)} {each} as a present for {b}. {a.He} pays with {DOLLAR.of(paid)}.",
        f"{a} goes to the shop with {b}. {a.He} buys {good.of(x)} {each} and pays with {DOLLAR.of(paid)}.",
    )
    solution = (
        f"The cost is {x} * {price} = {DOLLAR.of(cost)}. The change is {paid} - {cost} = {DOLLAR.of(paid - cost)}."
    )
    return f"{question} How many dollars does {a} get back?", solution, paid - cost


def saving(s: Scene) -> Parts:
    """Still missing: price - weeks * x."""
    a, b, good, x, weeks, missing = s.a, s.b, s.choice(DEAR), s.randint(2, 15), s.randint(2, 12), s.randint(1, 40)
    price = x * weeks + missing
    question = (
        f"{a} wants to buy a {good.one} for {b}. It costs {DOLLAR.of(price)}. "
        f"{a.He} saves {DOLLAR.of(x)} every week for {WEEK.of(weeks)}. How many more dollars does {a.he} need?"
    )
    saved = x * weeks
    solution = (
        f"{a} saves {weeks} * {x} = {DOLLAR.of(saved)}. {a.He} needs {price} - {saved} = {DOLLAR.of(missing)} more."
    )
    return question, solution, missing


def same_price(s: Scene) -> Parts:
    """From one price to another: total / x * y."""
    a, b, good, x, y, price = s.a, s.b, s.choice(GOODS), s.randint(2, 9), s.randint(1, 11), s.randint(2, 20)
    y += y >= x
    question = (
        f"{a} pays {DOLLAR.of(x * price)} for {good.of(x)}. {b} buys {good.of(y)} at the same price. "
        f"How many dollars does {b} pay?"
    )
    solution = (
        f"One {good.one} costs {x * price} / {x} = {DOLLAR.of(price)}. {b} pays {y} * {price} = {DOLLAR.of(y * price)}."
    )
    return question, solution, y * price


def distance(s: Scene) -> Parts:
    """speed * time."""
    a, b, hours = s.a, s.b, s.randint(1, 9)
    mode, low, high = s.choice(
        (("walk", 3, 6), ("ride their bikes", 9, 22), ("go by train", 40, 160), ("go by boat", 8, 35))
    )
    speed = s.randint(low, high)
    question = s.either(
        f"{a} and {b} {mode} for {HOUR.of(hours)}. They travel {speed} kilometers every hour. How far do they go?",
        f"{a} and {b} {mode} at {speed} kilometers per hour. How far do they go in {HOUR.of(hours)}?",
    )
    return question, f"The distance is {speed} * {hours} = {speed * hours} kilometers.", speed * hours


def travel_time(s: Scene) -> Parts:
    """distance / speed."""
    a, b, speed = s.a, s.b, s.randint(4, 110)
    hours = s.randint(1, 3 if speed < 7 else 9)
    mode = "walks" if speed < 7 else "rides a bike" if speed < 26 else "drives with the family"
    question = (
        f"{a} {mode} to visit {b}, who lives {speed * hours} kilometers away. The speed is {speed} kilometers per hour."
    )
    ask = s.either(f"How many hours does the trip take {a}?", "How many hours is the trip?")
    return f"{question} {ask}", f"The time is {speed * hours} / {speed} = {HOUR.of(hours)}.", hours


def part(s: Scene) -> Parts:
    """A fraction of a whole number."""
    a, b, item, below, unit = s.a, s.b, s.choice(ITEMS), s.randint(3, 10), s.randint(1, 25)
    above = s.randint(2, below - 1)
    whole = below * unit
    question = s.either(
        f"{a} has {item.of(whole)}. {a.He} gives {above}/{below} of them to {b}. How many does {b} get?",
        f"{a} shows {b} {item.of(whole)}. {above}/{below} of them are red. How many {item.many} are red?",
    )
    solution = (
        f"1/{below} of the {item.many} is {whole} / {below} = {unit}. "
        f"So {above}/{below} is {above} * {unit} = {above * unit} {item.many}."
    )
    return question, solution, above * unit


def percent(s: Scene) -> Parts:
    """A price after a discount."""
    a, b, good, rate = s.a, s.b, s.choice(DEAR), s.choice((5, 10, 20, 25, 30, 40, 50, 60, 75))
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


def average(s: Scene) -> Parts:
    """The mean of three or four numbers."""
    a, b, count, mean = s.a, s.b, s.randint(3, 4), s.randint(6, 60)
    values = [s.randint(max(1, mean - 12), mean + 12) for _ in range(count - 1)]
    values.append(mean * count - sum(values))
    if values[-1] < 1:  # the last value must be positive; equal values always have this mean
        values = [mean] * count
    sums, total = [], values[0]
    for value in values[1:]:
        sums.append(f"{total} + {value} = {total + value}")
        total += value
    listed = ", ".join(map(str, values[:-1])) + f" and {values[-1]}"
    what = s.choice(("read", "wrote"))
    question = (
        f"{a} tells {b} how many pages {a.he} {what} on {DAY.of(count)}: {listed}. "
        "What is the average number of pages per day?"
    )
    return question, f"Add the pages: {', '.join(sums)}. The average is {total} / {count} = {PAGE.of(mean)}.", mean


def perimeter(s: Scene) -> Parts:
    """2 * (x + y)."""
    a, b, y = s.a, s.b, s.randint(2, 60)
    x = y + s.randint(0, 40)
    place = s.choice(("garden", "field", "yard", "park"))
    question = (
        f"{a} and {b} build a fence around a {place}. The {place} is {METER.of(x)} long and {METER.of(y)} wide. "
        "How many meters of fence do they need?"
    )
    half = x + y
    solution = (
        f"A long and a short side are {x} + {y} = {half} meters. All four sides are 2 * {half} = {2 * half} meters."
    )
    return question, solution, 2 * (x + y)


def area(s: Scene) -> Parts:
    """x * y."""
    a, b, y = s.a, s.b, s.randint(2, 30)
    x = y + s.randint(0, 30)
    place, work = s.choice((("a wall", "paint"), ("a floor", "sweep"), ("a lawn", "mow"), ("an ice rink", "clean")))
    tall = "high" if work == "paint" else "wide"
    question = (
        f"{a} and {b} {work} {place} that is {METER.of(x)} long and {METER.of(y)} {tall}. "
        f"How many square meters do they {work}?"
    )
    return question, f"The area is {x} * {y} = {x * y} square meters.", x * y


def ages(s: Scene) -> Parts:
    """x + y + z."""
    a, b, x, y, z = s.a, s.b, s.randint(4, 40), s.randint(1, 15), s.randint(2, 20)
    question = f"{a} is {YEAR.of(x)} old. {b} is {YEAR.of(y)} older than {a}. How old will {b} be in {YEAR.of(z)}?"
    solution = f"Now {b} is {x} + {y} = {YEAR.of(x + y)} old. In {YEAR.of(z)}, {b} will be {x + y} + {z} = {x + y + z}."
    return question, solution, x + y + z


def calendar(s: Scene) -> Parts:
    """weeks * 7 + days."""
    a, b, weeks, days = s.a, s.b, s.randint(1, 51), s.randint(1, 6)
    event = s.choice(("birthday", "school play", "holiday", "concert", "first race"))
    question = (
        f"{a} counts the days until {b}'s {event}. It is in {WEEK.of(weeks)} and {DAY.of(days)}. How many days is that?"
    )
    solution = (
        f"The weeks have {weeks} * 7 = {weeks * 7} days. In all it is {weeks * 7} + {days} = {weeks * 7 + days} days."
    )
    return question, solution, weeks * 7 + days


def clock(s: Scene) -> Parts:
    """Minutes between two times of one day."""
    a, b, start, hours = s.a, s.b, s.randint(1, 8), s.randint(1, 4)
    early, late = 5 * s.randint(0, 5), 5 * s.randint(6, 11)
    act = s.choice(("play", "read", "paint", "bake", "work in the garden"))
    question = f"{a} and {b} {act} from {start}:{early:02d} to {start + hours}:{late:02d}. How many minutes is that?"
    span, rest = hours * 60, late - early
    solution = (
        f"From {start}:{early:02d} to {start + hours}:{early:02d} there are {hours} * 60 = {span} minutes. "
        f"Then {late} - {early} = {MINUTE.of(rest)} more pass. In all it is {span} + {rest} = {span + rest} minutes."
    )
    return question, solution, span + rest


def sequence(s: Scene) -> Parts:
    """The next number of a pattern."""
    a, b, first, step, count = s.a, s.b, s.randint(0, 60), s.randint(2, 25), s.randint(4, 5)
    terms = [first + step * i for i in range(count)]
    listed = ", ".join(map(str, terms))
    question = s.either(
        f"{a} writes down a pattern for {b}: {listed}. What number comes next?",
        f"{a} counts in equal steps: {listed}. {b} wants to say the next number. What is it?",
    )
    solution = (
        f"Each step is {terms[1]} - {first} = {step}. The next number is {terms[-1]} + {step} = {terms[-1] + step}."
    )
    return question, solution, terms[-1] + step


def doubling(s: Scene) -> Parts:
    """x doubled three times."""
    a, b, item, x = s.a, s.b, s.choice(ITEMS), s.randint(1, 60)
    days = s.choice(("Monday, Tuesday, Wednesday and Thursday", "Tuesday, Wednesday, Thursday and Friday"))
    names = days.replace(" and", ",").split(", ")
    question = (
        f"{a} and {b} collect {item.many} on {days}. On {names[0]} they find {x}, and on each day after that they find "
        f"twice as many as on the day before. How many {item.many} do they find on {names[-1]}?"
    )
    steps = ". ".join(f"On {day} they find 2 * {x * 2**i} = {x * 2 ** (i + 1)}" for i, day in enumerate(names[1:]))
    return question, f"{steps}.", x * 8


def teamwork(s: Scene) -> Parts:
    """(x + y) * hours."""
    a, b, item, x, y, hours = s.a, s.b, s.choice(ITEMS), s.randint(2, 30), s.randint(2, 30), s.randint(2, 9)
    act = s.choice(("pack", "sort", "wash", "count"))
    question = (
        f"{a} can {act} {item.of(x)} in one hour, and {b} can {act} {y}. "
        f"How many {item.many} can they {act} together in {HOUR.of(hours)}?"
    )
    both = x + y
    solution = (
        f"In one hour they {act} {x} + {y} = {both}. In {HOUR.of(hours)} they {act} {both} * {hours} = {both * hours}."
    )
    return question, solution, both * hours


MEASURES: tuple[ProblemKind, ...] = (
    change, saving, same_price, distance, travel_time, part, percent, average, perimeter, area, ages, calendar, clock,
    sequence, doubling, teamwork,
)  # fmt: skip
