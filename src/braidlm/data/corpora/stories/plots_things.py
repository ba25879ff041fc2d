"""Plots about things: lost, broken, shared, found, grown, built."""

from braidlm.data.corpora.stories.world import BREAKABLE, Plot

LOST = Plot(
    "lost",
    (
        (
            "{When}, {h} took {h.his} {t} {p.to}.",
            "{When}, {h} was playing with {h.his} {t} {p.at}.",
            "{h} had {t.a}. {When}, {h.he} carried it {p.to}.",
            "{h}'s favorite thing was {t.a}. {When}, {h.he} took it {p.to}.",
        ),
        (
            "But when it was time to go home, the {t} was gone.",
            "{h} ran and jumped and rolled on the ground. Then {h.he} looked around, and the {t} was not there.",
            "{h} put it down to look at a snail. When {h.he} turned around, the {t} was gone.",
            "{h} fell asleep under a tree. When {h.he} woke up, {h.he} could not see the {t}.",
        ),
        (
            '"Oh no! I lost my {t.noun}!" {h} cried.',
            '{h} felt {sad}. "Where is my {t}?" {h.he} asked.',
            "{h.He} looked and looked, but {h.he} could not find it. A tear ran down {h.his} cheek.",
            '"It was here a moment ago," said {h}, and {h.his} lip began to shake.',
        ),
    ),
    (
        (
            '{f} heard {h.him}. "Do not cry," {f} said. "I will help you look."',
            '{f} saw that {h} was {sad} and came over. "Let us look for it together," {f.he} said.',
            '{h} told {f} about it. {f} took {h.his} {h.hand} and said, "We will find it."',
        ),
        (
            "They walked slowly and looked everywhere.",
            "They looked behind every tree and under every stone.",
            "First they looked on the path. Then they looked near the fence.",
            "{h} looked on the left side, and {f} looked on the right side.",
        ),
        (
            "Then {f} saw something {t.look} {spot}. It was the {t}!",
            'At last {f} pointed at something {spot}. "Is that yours?" {f.he} asked. It was the {t}!',
            "Soon {h} found the {t} {spot}. {h.He} picked it up and jumped for joy.",
            "And there, {spot}, was the {t}.",
        ),
        (
            '"Thank you, {f}!" said {h}. {h.He} held the {t.noun} tight and smiled.',
            "{h} gave {f} a big hug and let {f.him} hold the {t.noun} all the way home.",
            '"You are a true friend," {h} said, and {h.he} was {glad} again.',
        ),
    ),
    (
        "From that day on, {h} always looked after {h.his} things.",
        "{both} went home {glad}.",
        "That night, {h} went to sleep with the {t} next to {h.his} bed.",
        "After that, {h} never left {h.his} {t.noun} behind again.",
    ),
    {"spot": ("under a bush", "behind a big rock", "in the tall grass", "next to a log", "under some leaves",
              "between two roots", "in a hole in the ground", "on a low branch")},
    scenery=True,
    optional=(2, 4, 6),
)  # fmt: skip

BROKEN = Plot(
    "broken",
    (
        (
            "{h} had {t.a} that {h.his} {g} had made. {When}, {h.he} showed it to {f}.",
            "{When}, {f} came to play, and {h} showed {f.him} {h.his} new {t}.",
            "For {h.his} birthday, {h} got {t.a}. {When}, {h.he} took it {p.to} to play with {f}.",
        ),
        (
            "They played with the {t} all morning.",
            "They took turns, and they laughed a lot.",
            "{h} let {f} hold the {t} first, because {h.he} was kind.",
        ),
        (
            "Then {f} tripped over a stone, and the {t.noun} fell down. Crack! A piece came off.",
            "But {f} pulled too hard, and the {t.noun} broke with a snap.",
            "All at once, {f} slipped and dropped the {t.noun}. It broke in two.",
        ),
        (
            '{f} looked at the ground. "I am so sorry, {h}," {f.he} said. "I did not mean to do it."',
            '{f} began to cry. "I broke your {t.noun}," {f.he} said. "Please do not be angry."',
            "{f} felt very bad, and {f.his} face turned red.",
        ),
    ),
    (
        (
            '{h} took a deep breath. "It was an accident," {h.he} said. "Maybe we can fix it."',
            '{h} was {sad}, but {h.he} put an arm around {f}. "Let us try to mend it," {h.he} said.',
            '"Do not worry," {h} told {f.him}. "My {g} knows how to fix things."',
        ),
        (
            "They found some {fix} and asked {h}'s {g} for help. {g.He} held the pieces while they worked.",
            "{h}'s {g} gave them some {fix} and showed them what to do.",
            "They carried the pieces to {h}'s {g}, and {g.he} brought some {fix}.",
        ),
        (
            "Slowly and carefully, they put the {t.noun} together again.",
            "It took a long time, but in the end the {t} was as good as new.",
            "When they were done, the {t} looked a little different, but it worked.",
        ),
        (
            '"It is even better than before!" said {h}.',
            "{f} smiled for the first time since the fall.",
            '"Now it is special, because we fixed it together," {h} said.',
        ),
    ),
    (
        "{both} played with the {t} until the sun went down.",
        "And {f} was always careful with {h}'s {t.noun} after that.",
        "They were still best friends, and that was what mattered most.",
        "{h} knew that a friend is worth more than any toy.",
    ),
    {"fix": ("glue", "string", "tape", "wire and glue", "glue and paint")},
    things=BREAKABLE,
    scenery=True,
    optional=(1, 7),
)  # fmt: skip

SHARING = Plot(
    "sharing",
    (
        (
            "{When}, {h}'s {g} gave {h.him} {food.a}.",
            "{When}, {h} went {p.to} with {food.a} in {h.his} bag.",
            "{When}, {h} sat down {p.at} to eat {food.a}.",
        ),
        (
            '"This is all mine," {h} thought. {h.He} wanted to eat it all by {h.himself}.',
            "It smelled so good that {h.he} did not want to give any of it away.",
            "{h} hid it behind {h.his} back, because {h.he} did not want to share it.",
        ),
        (
            "Then {f} came by. {f.He} had forgotten {f.his} lunch, and {f.he} was very hungry.",
            'Just then, {f} sat down next to {h.him}. "I have nothing to eat today," {f} said in a small voice.',
            "{f} was there, too, and {f.his} tummy made a loud noise. {f.He} had not eaten anything since morning.",
        ),
    ),
    (
        (
            "{h} looked at {f}'s sad eyes. Then {h.he} looked at the {food}.",
            "{h} thought about it. {h.He} remembered how {f} had once helped {h.him}.",
            "At first {h} said nothing. But {h.he} felt a little bad inside.",
        ),
        (
            '"Here," said {h}, "half of it is for you."',
            '{h} cut the {food} in two and gave {f} the bigger half. "This part is yours," {h.he} said.',
            '"Would you like some?" {h} asked, and {h.he} gave {f.him} a big piece.',
        ),
        (
            '"Thank you!" said {f}. "You are so kind." They ate together and talked about {talk}.',
            "{f}'s face lit up. The two friends sat side by side and ate and laughed about {talk}.",
            "{f} thanked {h.him} and took a bite. Then they told each other stories about {talk}.",
        ),
        (
            "{h} was surprised. The {food} tasted even better than before.",
            "The next day, {f} brought some {gift}, and half of them were for {h}.",
            "When it was all gone, {f} gave {h.him} some {gift} to say thank you.",
        ),
    ),
    (
        "{h} learned that sharing makes everything better.",
        "From then on, {h} always kept a piece for a friend.",
        "Both of them were full and {glad}.",
        "Sharing had made two friends happy, and not just one.",
    ),
    {"food": ("apple pie", "cherry cake", "big sandwich", "honey cake", "jam sandwich", "cheese pie", "pancake",
              "orange cake", "carrot cake", "berry pie"),
     "talk": ("dragons", "the moon", "the sea", "pirates", "funny dreams", "kings and queens", "trains"),
     "gift": ("berries", "nuts", "cookies", "plums", "strawberries", "grapes")},
    scenery=True,
    optional=(1, 3, 6),
)  # fmt: skip

FOUND = Plot(
    "found",
    (
        (
            "{When}, {h} found {t.a} {p.at}. It was not {h.hers}.",
            "{When}, {h} was walking {p.at} when {h.he} saw {t.a} on the ground.",
            "{When}, {h} went {p.to}. There, on an old bench, lay {t.a}.",
        ),
        (
            "{h} liked it very much. {h.He} wanted to keep it.",
            "It was so pretty that {h} put it in {h.his} pocket.",
            '"How lovely it is!" said {h}. "I wish it were mine."',
        ),
        (
            "A little later, {h.he} met {f}. {f.He} was looking {sad}.",
            "Then {h} heard someone crying. It was {f}.",
            "On the way home, {h.he} saw {f}, who was searching for something.",
        ),
        (
            '"I have lost my {t}," {f} said. "My {g} gave it to me."',
            '"What is wrong?" {h} asked. "My {t} is gone," said {f}, "and I cannot find it."',
            '"Have you seen my {t}?" {f} asked {h.him}. "I have looked for it all day."',
        ),
    ),
    (
        (
            "{h} felt the {t.noun} in {h.his} {h.hand}. It was hard to give it back, but {h.he} knew what was right.",
            "For a moment, {h} did not know what to do. But {h.he} did not want to lie to {h.his} friend.",
            "{h} could have kept quiet, but {h.he} wanted to be honest.",
        ),
        (
            '"I found it," {h} said. "Here it is."',
            "{h} held out the {t} and said, \"I think this is yours.\"",
            '"Close your eyes," said {h}. Then {h.he} put the {t} into {f}\'s {f.hand}.',
        ),
        (
            '{f} jumped up and down. "My {t.noun}! Thank you, thank you!"',
            "{f} could not believe it. {f.He} laughed and hugged {h.him}.",
            "{f}'s tears were gone at once, and {f.he} danced around in a circle.",
        ),
        (
            "{f} asked {h} to come home with {f.him}, and they ate warm {treat} together.",
            "The next day, {f} brought {h.him} some {treat}.",
            '"You can play with it whenever you like," {f} said.',
        ),
    ),
    (
        "{h} was proud of {h.himself}, because {h.he} had told the truth.",
        "Telling the truth felt much better than any {t.noun}.",
        "And {h} went home with a {glad} heart.",
        "{both} became even better friends that day.",
    ),
    {"treat": ("soup", "cookies", "pancakes", "pudding", "cake", "porridge")},
    optional=(1, 4, 7),
)  # fmt: skip

GROWING = Plot(
    "growing",
    (
        (
            "{When}, {h}'s {g} gave {h.him} a tiny seed. \"Put it in the earth and wait,\" {g.he} said.",
            "{When}, {h} found a tiny seed {p.at} and took it home.",
            "{When}, {f} gave {h} a tiny seed in a paper bag.",
        ),
        (
            "{h} made a hole in the garden, put the seed in, and gave it some water.",
            "{h} planted it in a {pot} pot and put the pot in the sun.",
            "{h} and {f} planted it next to the garden wall.",
        ),
        (
            "The next morning {h} ran outside to look, but there was nothing to see.",
            "Every morning {h} looked at it, but nothing came up.",
            "{h} waited one day. {h.He} waited two days. Nothing happened.",
        ),
        (
            '"It will never grow!" {h} said, and {h.he} stamped {h.his} foot.',
            '{h} was {sad}. "Maybe my seed is asleep," {h.he} said.',
            '"I do not want to wait any longer," {h} told {f}.',
        ),
    ),
    (
        (
            '"Good things take time," said {h.his} {g}, and {g.he} smiled.',
            '"Seeds are slow," said {f}. "You only have to be patient."',
            '"Do not give up," {f} said. "I will help you water it."',
        ),
        (
            "So {h} watered it every day, and {f} sang to it.",
            "So they gave it water every morning and pulled out the weeds.",
            "So {h} waited. {h.He} watered the seed when it was hot and covered it when it was cold.",
        ),
        (
            "One week later, a small green leaf came out of the earth.",
            "Then, after a night of rain, something green came up.",
            "And one day there was a little green stem.",
        ),
        (
            "It grew and grew until it was a {look} {plant}, taller than {h}.",
            "By the end of summer it was a big {plant}, and everyone came to see it.",
            'Soon it was a beautiful {look} {plant}. "We did it!" {h} shouted.',
        ),
    ),
    (
        "{h} was so {glad} that {h.he} gave {f} a seed of {f.his} own.",
        "{h} had learned to wait, and it had been worth it.",
        "{both} sat down beside it and smiled.",
        "Now {h} knew that good things need time and care.",
    ),
    {"pot": ("clay", "blue", "round", "yellow", "brown"), "look": ("yellow", "red", "pink", "white", "purple"),
     "plant": ("flower", "rose", "sunflower", "tulip", "bush")},
    optional=(3,),
)  # fmt: skip

BUILDING = Plot(
    "building",
    (
        (
            "{When}, {both} wanted to build a {house} {p.at}.",
            '{When}, {h} had an idea. "Let us build a {house} {p.at}!" {h.he} said to {f}.',
            "{When}, {f} asked {h} to help {f.him} build a {house} {p.at}.",
        ),
        (
            "{h} brought {wood}, and {f} brought {more}.",
            "They used {wood} and {more}, and they worked hard.",
            "They carried {wood} from far away until their legs were tired.",
        ),
        (
            "But the wind blew, and everything fell down.",
            "But one wall was too weak. Bump! The whole thing fell over.",
            "It looked fine at first. Then it shook, and it came down with a crash.",
        ),
        (
            '"I cannot do this," said {h}, and {h.he} sat down on the ground.',
            "{f} kicked a stone. {f.He} was ready to go home.",
            '"All that work for nothing!" {f} said, and {f.he} looked {sad}.',
        ),
    ),
    (
        (
            "Just then {h}'s {g} walked by. \"Make the bottom wide and strong,\" {g.he} told them.",
            '{h} thought hard. "We need bigger pieces at the bottom," {h.he} said.',
            '{f} looked at a bird in its nest. "See how the bird does it!" {f.he} said. "One small piece at a time."',
        ),
        (
            "So they tried again. {h} held the walls, and {f} tied them together with a rope.",
            "They started once more, and this time they did not hurry.",
            "{h} and {f} went back to work. One lifted, and the other pushed.",
        ),
        (
            "When the wind came back, the {house} did not move at all.",
            "At last the {house} was done. It was strong, and it had a little door.",
            "Before the sun went down, the {house} stood straight and tall.",
        ),
        (
            '"Look what we made!" said {h}.',
            '"I knew we could do it!" {f} shouted, and {f.he} clapped.',
            "They crawled inside and ate some {snack}.",
        ),
    ),
    (
        "{both} were very proud of their {house}.",
        "Together they had done what one of them could not do alone.",
        "They played there every day until the first snow fell.",
        "That evening they were tired but {glad}.",
    ),
    {"house": ("tree house", "hut", "tower", "fort", "little bridge", "tent"),
     "wood": ("long sticks", "flat stones", "old boards", "big boxes", "branches"),
     "more": ("rope", "leaves", "mud", "moss", "a blanket"),
     "snack": ("apples", "nuts", "bread", "pears", "cookies")},
    scenery=True,
    optional=(1, 3, 7),
)  # fmt: skip

THINGS_PLOTS = (LOST, BROKEN, SHARING, FOUND, GROWING, BUILDING)
