"""Plots about feelings: fear, bad weather, helping, learning."""

from braidlm.data.corpora.stories.world import Plot

AFRAID = Plot(
    "afraid",
    (
        (
            "But there was one thing that {h} was afraid of: {fear}.",
            "{h} had a secret. {h.He} was afraid of {fear}.",
            "There was only one problem. {h} was very scared of {fear}.",
        ),
        (
            "{When}, {f} asked {h.him}, \"Why do you never come with me {p.to} in the evening?\"",
            "{When}, {f} asked {h} to stay at {f.his} house for the night.",
            "One evening, {h} and {f} stayed outside too long, and it got dark.",
        ),
        (
            "{h}'s knees began to shake, and {h.he} hid {h.his} face.",
            'At first {h} did not want to tell. Then {h.he} said softly, "I am scared of {fear}."',
            "When {h} thought of {fear}, {h.his} heart beat fast.",
        ),
    ),
    (
        (
            '{f} did not laugh. "I used to be scared, too," {f.he} said. "Hold my {f.hand}."',
            '"That is all right," said {f}. "Everyone is afraid of something." Then {f.he} took {h.his} {h.hand}.',
            '"I am here," {f} told {h.him}, "and we are brave when we are together."',
        ),
        (
            "{f} gave {h.him} a small {light}, and it shone in the dark.",
            "They counted to ten very slowly. {h} took a step, and then {h.he} took one more.",
            "They sang a {song} song, louder and louder, and {h} felt a little better.",
        ),
        (
            "After a while {h} looked around. It was not so bad at all.",
            'Soon {h} opened {h.his} eyes. "Is that all?" {h.he} asked, and {h.he} had to laugh.',
            "Bit by bit, the fear grew smaller. Then it was gone.",
        ),
        (
            '"I did it!" {h} said.',
            '"You see?" said {f}. "You are braver than you think."',
            "{f} clapped, because {f.he} was so proud of {f.his} friend.",
        ),
    ),
    (
        "After that, {h} was not afraid of {fear} anymore.",
        "That night, {h} slept well and had a sweet dream.",
        "And {h} was proud of {h.himself} for being so brave.",
        "After that, whenever {h.he} was scared, {h} thought of {f} and smiled.",
    ),
    {"fear": ("the dark", "thunder", "shadows", "the old owl", "loud noises", "the night", "the black cat"),
     "light": ("lamp", "candle", "lantern", "torch"), "song": ("silly", "happy", "funny", "merry")},
    optional=(2, 6),
)  # fmt: skip

WEATHER = Plot(
    "weather",
    (
        (
            "{When}, {both} wanted to {plan} {p.at}.",
            "{When}, {h} asked {f}, \"Shall we {plan} {p.at}?\" {f.He} nodded.",
            "{When}, {h} went {p.to} with {f}. They wanted to {plan} there.",
        ),
        (
            "But {sky}.",
            "They had only just started when {sky}.",
            'Suddenly {sky}. "Oh dear!" said {f}.',
        ),
        (
            "{h} was {sad}. {h.His} {day} day was spoiled.",
            '"It is not fair!" {h} said, and {h.he} made an angry face.',
            "{f} was cold, and {f.his} hair was wet.",
            "They had no umbrella, and they did not know what to do.",
        ),
    ),
    (
        (
            '{f} took {h.his} {h.hand} and called, "Quick, run to the barn!"',
            'Then {h} saw an old barn. "Come in here!" {h.he} called.',
            "They ran as fast as they could to {h}'s house, and {h}'s {g} let them in.",
        ),
        (
            "Inside, it was dry and warm. They {fun}.",
            "There they found a dry place to sit, and they {fun}.",
            "They shook off the water, sat down, and {fun}.",
        ),
        (
            "It was so much fun that they forgot about the weather.",
            '{h} laughed. "This is better than our plan," {h.he} said.',
            "{f} told one joke after the other, and {h} laughed until {h.his} tummy hurt.",
        ),
        (
            "When they looked outside again, the sun was back, and there was a rainbow in the sky.",
            "After an hour the clouds went away, and the whole world was shiny and clean.",
            "Later, the sky was clear, and they jumped over the puddles on their way home.",
        ),
    ),
    (
        '"I like every kind of weather," {h} said, "as long as you are with me."',
        "It turned out to be a wonderful day.",
        "{both} never forgot that {day} day.",
        "That evening, {h} drew a picture of it for {f}.",
    ),
    {"plan": ("have a picnic", "fly a kite", "play ball", "look for shells", "race each other", "paint a picture"),
     "sky": ("dark clouds came, and it began to rain", "a cold wind came, and rain fell from the sky",
             "the sky turned gray, and big drops fell", "there was thunder, and it rained very hard"),
     "day": ("special", "big", "lovely"),
     "fun": ("played a guessing game", "made shadows on the wall", "sang all the songs they knew",
             "told each other riddles", "listened to the rain and ate cookies", "pretended to be on a ship")},
    optional=(2, 5),
)  # fmt: skip

ANIMAL = Plot(
    "animal",
    (
        (
            "{When}, {h} went for a walk {p.at}, and {h.he} heard a soft cry.",
            "{When}, {both} were playing {p.at} when they heard a tiny noise.",
            "{When}, {h} saw something small move {p.at}.",
        ),
        (
            "It was {c.a}. {hurt}.",
            "There sat {c.a}, all alone. {hurt}.",
            "Under a bush lay {c.a}. {hurt}.",
        ),
        (
            '"Poor little thing," said {h}. "Do not be afraid."',
            "The {c.kind} looked at {h.him} with big eyes and shook with fear.",
            "{h} wanted to help, but {h.he} did not know how.",
        ),
    ),
    (
        (
            "{h} ran to get {f}. Together they put the {c.kind} in a box with soft {soft}.",
            "{h} called {f}, and {f.he} brought a warm {cloth}. They carried the {c.kind} home in it.",
            '{f} came to help. "We must be very gentle," {f.he} said, and {f.he} held the {c.kind} close.',
        ),
        (
            "{h}'s {g} showed them how to take care of {c.him}.",
            "They gave {c.him} some water and something to eat.",
            "{h} sat beside the {c.kind} the whole night and watched over {c.him}.",
        ),
        (
            "Day by day, the {c.kind} grew stronger.",
            "After three days, the {c.kind} was well again.",
            "Soon the {c.kind} could stand up, and {c.his} eyes were bright.",
        ),
        (
            "Then they took {c.him} back {p.to}. The {c.kind} turned around once, as if to say thank you.",
            'At last it was time to say goodbye. "Be careful, little friend," said {h}.',
            "When {h} opened the door, the {c.kind} was happy to be free, and {c.he} hurried away to {c.his} mother.",
        ),
    ),
    (
        "{both} waved for a long time. They were sad and happy at once.",
        "Every spring after that, the {c.kind} came back to visit {h}.",
        "{h} was happy, because {h.he} had helped someone smaller than {h.himself}.",
        "And from that day on, the {c.kind} was their friend.",
    ),
    {"hurt": ("One of its legs was hurt", "It was wet and tired", "It had fallen and could not get up",
              "It was cold and hungry", "It had lost its mother"),
     "soft": ("grass", "wool", "moss", "hay", "leaves"), "cloth": ("towel", "blanket", "scarf", "coat")},
    optional=(2, 4),
)  # fmt: skip

SKILL = Plot(
    "skill",
    (
        (
            "More than anything, {h} wanted to learn how to {skill}.",
            "{h} wished that {h.he} could {skill}, just like {f}.",
            "{f} could {skill} very well, but {h} could not.",
        ),
        (
            "{When}, {h} tried it {p.at}, but it went wrong.",
            "{When}, {h} tried to do it all by {h.himself}. It was much too hard.",
            "{When}, {h} tried again and again {p.at}, and each time {h.he} failed.",
        ),
        (
            '"I will never learn it," {h} said, and {h.his} eyes were full of tears.',
            "{h} was so angry that {h.he} wanted to stop.",
            '"Why is it so hard for me?" {h} asked.',
        ),
    ),
    (
        (
            '{f} sat down next to {h.him}. "I could not do it at first, either," {f.he} said.',
            '"I will show you," said {f}. "Watch me, and then do the same."',
            '{h}\'s {g} came out of the house. "Nobody can do it on the first day," {g.he} said.',
        ),
        (
            "So {h} practiced every day, in the morning and in the evening.",
            "{h} tried once more. This time {f} stayed close and helped {h.him}.",
            "They practiced together, slowly at first and then a bit faster.",
        ),
        (
            "On Monday it was bad. On Tuesday it was better. On Friday {h} could do it!",
            "And then, all of a sudden, it worked!",
            "After {days} days, {h} did it without any help.",
        ),
        (
            '"Look at me!" {h} shouted. "I can {skill}!"',
            "{f} cheered, and {h} felt as tall as a tree.",
            '"I knew it," said {f}, and {f.he} gave {h.him} a high five.',
        ),
    ),
    (
        "{h} had learned that you must never give up.",
        "From then on, {both} liked to {skill} together.",
        "Later, {h.he} taught it to all {h.his} little cousins.",
        "That was the proudest day of {h.his} life.",
    ),
    {"skill": ("swim", "ride a bike", "whistle", "tie a bow", "read", "skate", "jump rope", "play the flute", "dive",
               "write a letter", "catch a ball", "play the drum", "row a boat", "juggle"),
     "days": ("four", "five", "six", "seven", "nine", "ten")},
    optional=(2, 6),
)  # fmt: skip

RACE = Plot(
    "race",
    (
        (
            "{When}, there was a big race {p.at}. The first prize was {t.a}.",
            "{When}, everyone came {p.to} for the big race. The winner would get {t.a}.",
            "{When}, {h} and {f} wanted to run in the great race {p.at}. There was {t.a} for the winner.",
        ),
        (
            "{h} wanted to win more than anything. {h.He} had practiced for {weeks} weeks.",
            '"I am going to win," {h} told {f}, and {h.he} jumped up and down.',
            "{h} was the fastest of them all, and {h.he} could almost feel the prize in {h.his} {h.hand}.",
        ),
        (
            '"Ready, steady, go!" someone called, and off they ran. {h} was in front.',
            "The race began. {h} ran like the wind, and {f} was right behind {h.him}.",
        ),
        (
            "Then {h} heard a cry. {f} had {trip}, and {f.his} knee was hurt.",
            "But near the end, {f} cried out in pain. {f.He} had {trip}.",
        ),
    ),
    (
        (
            "{h} could see the finish line. But {h.he} stopped and turned around.",
            "{h} wanted the prize so much. But {h.he} wanted to help {f} even more.",
            "For a second, {h} did not know what to do. Then {h.he} ran back to {h.his} friend.",
        ),
        (
            '"Lean on me," {h} said, and {h.he} helped {f} to stand up.',
            '"Go on and win!" said {f}. "No," said {h}, "we will finish this together."',
            "{h.He} put {f}'s arm around {h.his} neck and held {f.him} up.",
        ),
        (
            "Side by side, they walked over the finish line. They were the last ones, but everyone cheered.",
            "They were very slow. All the others were done long before them.",
            "Step by step, they came to the end, and the people clapped and clapped.",
        ),
        (
            "The winner came to them with the {t}. \"You should have it, {h},\" the winner said.",
            '"The prize goes to the kindest runner," said {h}\'s {g}, and {g.he} gave the {t} to {h.him}.',
            "In the end, {h} got the {t} for being such a good friend.",
        ),
    ),
    (
        "{h} shared the {t} with {f}, and both of them were {glad}.",
        "Being kind was better than being first.",
        "{f} never forgot what {h} had done for {f.him}.",
        "And when {f}'s knee was well again, they ran together every day.",
    ),
    {"weeks": ("two", "three", "four", "five", "six"),
     "trip": ("tripped over a root", "fallen over a stone", "slipped in the mud", "stepped into a hole")},
    things=("cup", "medal", "crown", "ribbon", "hat", "kite", "bell"),
    scenery=True,
    optional=(1, 4, 6),
)  # fmt: skip

FEELINGS_PLOTS = (AFRAID, WEATHER, ANIMAL, SKILL, RACE)
