"""Plots about friends: quarrels, surprises, losing the way, being ill, someone new, wanting too much."""

from braidlm.data.corpora.stories.world import Plot

QUARREL = Plot(
    "quarrel",
    (
        (
            "{When}, {both} were playing {p.at} with {t.a}.",
            "{When}, they found {t.a} {p.at}, and both of them wanted it.",
            "{When}, {f} brought {t.a}, and they took it {p.to}.",
        ),
        (
            '"It is my turn!" said {h}. "No, it is mine!" said {f}.',
            "{h} pulled on one side of it, and {f} pulled on the other.",
            '"You always want to go first!" {h} shouted. {f} shouted back.',
        ),
        (
            "{h} got so angry that {h.he} walked away.",
            '"Then I will play by myself!" said {f}, and {f.he} went home.',
            "They said some mean words, and then they did not talk anymore.",
        ),
        (
            "{h} sat alone under a tree. It was no fun without {f}.",
            "At home, {h} was sad. {h.He} did not even want to eat {h.his} supper.",
            "{h} tried to play a game alone, but {h.he} was bored.",
        ),
    ),
    (
        (
            '"Sometimes a little word can fix a big thing," said {h}\'s {g}.',
            "{h} thought about all the nice things that {f} had done for {h.him}.",
            "After some time, {h} was not angry anymore. {h.He} just missed {h.his} friend.",
        ),
        (
            "So {h} went to {f}'s house and knocked on the door.",
            "{h} picked some {flowers} and went to look for {f}.",
            "The next day, {h} walked up to {f} and looked {f.him} in the eye.",
        ),
        (
            '"I am sorry," {h} said. "I was mean to you." "I am sorry, too," said {f}.',
            '"Can we be friends again?" {h} asked. "Yes, please!" said {f}.',
            'Both of them said "I am sorry" at the very same time, and they had to laugh.',
        ),
        (
            "From then on, they took turns with the {t}. First {h} had it, and then it was {f}'s turn.",
            '"You can have the {t} first," said {h}. "No, you first," said {f}.',
            "They found out that the {t} was much more fun for two.",
        ),
    ),
    (
        "And they were better friends than ever.",
        "{both} hugged, and the quarrel was over.",
        "{h} was happy to have {h.his} friend back.",
        "They never again had a fight about a {t.noun}.",
    ),
    {"flowers": ("daisies", "tulips", "roses", "wild flowers", "violets")},
    optional=(3, 4),
    things=("ball", "kite", "drum", "wagon", "toy boat", "toy truck", "toy train", "doll", "sled", "hoop"),
)  # fmt: skip

SURPRISE = Plot(
    "surprise",
    (
        (
            "Early one morning, {h} woke up and jumped out of bed. It was {h.his} birthday!",
            "It was {h}'s birthday, and {h.he} could not wait to see {h.his} friends.",
        ),
        (
            "But when {h.he} went to see {f}, nobody opened the door.",
            '{h} ran to {f}. But {f} only said, "I am busy today," and {f.he} hurried away.',
            "But {f} did not come, and nobody said a word about it.",
        ),
        (
            '"Everyone has forgotten me," {h} thought. {h.He} felt very {sad}.',
            "{h} walked {p.to} all alone and kicked a stone.",
            "{h} sat down {p.at} and looked at {h.his} feet.",
        ),
    ),
    (
        (
            "In the afternoon, {h}'s {g} called {h.him}. \"Please come into the {room},\" {g.he} said.",
            "When {h} came home, the {room} was dark and quiet.",
            "Later, {h} heard somebody giggle in the {room}. {h.He} slowly opened the door.",
        ),
        (
            '"Surprise!" called {f}, and all {h.his} friends jumped up.',
            '"Happy birthday, {h}!" {f} and all the others shouted.',
            "The lights went on, and there stood {f} with a big {cake} cake!",
        ),
        (
            '"I had to hide it from you," {f} said. "I am sorry that you were sad."',
            '"Did you think that I forgot?" {f} asked, and {f.he} laughed.',
            "{f} had worked on the secret plan for a whole week.",
        ),
        (
            "{f} gave {h.him} {t.a}. {h} had always wanted a {t.noun}!",
            "Then {h} opened {h.his} present. Inside was {t.a}, and it was just what {h.he} had wished for.",
            "{h} got {t.a} from {f}, and {h.he} held it up for everyone to see.",
        ),
    ),
    (
        "They ate cake, danced, and played games until it was late.",
        "It was the best birthday that {h} had ever had.",
        "{h} knew now that {h.his} friends would never forget {h.him}.",
        "{h} fell asleep that night with a smile and with the {t} next to {h.his} bed.",
    ),
    {"room": ("kitchen", "garden house", "big room", "barn"),
     "cake": ("chocolate", "lemon", "cherry", "strawberry", "honey", "cream")},
    optional=(2, 5),
)  # fmt: skip

LOST_WAY = Plot(
    "lost way",
    (
        (
            "{When}, {both} went into the deep woods to look for {look_for}.",
            "{When}, {h} followed {guide} far into the woods, and {f} ran after {h.him}.",
            "{When}, {h} said to {f}, \"Let us see where this path ends.\" They walked and walked.",
        ),
        (
            "Soon all the trees looked the same.",
            "The path grew smaller and smaller, and then it was gone.",
            "When they wanted to turn back, they could not find the way.",
        ),
        (
            '"We are lost," said {f}, and {f.his} voice was very small.',
            "{f} began to cry. {f.He} wanted to go home.",
            '"I want to go home," said {f}. It was getting dark.',
        ),
    ),
    (
        (
            "{h} was scared, too, but {h.he} tried to stay calm.",
            '"Do not worry," said {h}. {h.He} put {h.his} arm around {f}.',
            '"Let us sit down and think," {h} said to {f.him}.',
        ),
        (
            "Then {h} remembered the {mark} that they had passed before.",
            'Then {h} had an idea. "Let us be very quiet and listen," {h.he} said. Far away, they heard water.',
            "{h} climbed up a tall tree. From the top, {h.he} could see the {mark}.",
        ),
        (
            "They went that way, step by step, and held on to each other.",
            'They walked toward it, and they called, "Hello! Is anybody there?"',
            "{h} went first, and {f} held on to {h.his} coat.",
        ),
        (
            "At last they saw a light. It was {h}'s {g}, who was looking for them with a lamp.",
            "And there, at the edge of the woods, stood {h}'s {g}. {g.He} ran to them with open arms.",
            'Soon they heard a voice. "There you are!" called {h}\'s {g}, and {g.he} hugged them both.',
        ),
    ),
    (
        "At home they drank hot milk and told the whole story.",
        "{both} were safe, and they promised never to go so far again.",
        '"You were very brave," {f} told {h}.',
        "They were so glad to be home that they danced in the kitchen.",
    ),
    {"look_for": ("mushrooms", "berries", "nuts", "a waterfall", "a secret cave"),
     "guide": ("a butterfly", "a white bird", "a little stream", "a dragonfly"),
     "mark": ("old mill", "red bridge", "crooked tree", "stone tower", "little church")},
    optional=(1, 3),
)  # fmt: skip

ILL = Plot(
    "ill",
    (
        (
            "{When}, {h} went to {f}'s house to play. But {f} was ill and had to stay in bed.",
            "{When}, {f} did not come out to play. {f.He} had a bad cold.",
            "{When}, {f} had a sore throat, and {f.he} could not go outside.",
        ),
        (
            '"I am so bored," {f} said to {h}, and {f.he} had to cough.',
            "{f} looked out of the window and felt {sad}.",
            '"Everyone is having fun without me," said {f} in a weak voice.',
        ),
        (
            "{h} wanted to make {f.him} feel better. But what could {h.he} do?",
            "{h} went home and thought about {h.his} poor friend.",
            '"I must do something for {f}," {h} said to {h.his} {g}.',
        ),
    ),
    (
        (
            "With the help of {h.his} {g}, {h} made a big pot of {soup} soup.",
            "{h} took some paper and painted a picture of {picture}.",
            "{h} put {t.a} into a box and tied a bow around it.",
        ),
        (
            "{h.He} carried it to {f}'s house and knocked softly.",
            "Then {h.he} brought it to {f}.",
            '"This is for you," said {h}, and {h.he} sat down beside the bed.',
        ),
        (
            "{h} told {f.him} a long story about {picture}.",
            "They played a quiet game, and {h} let {f.him} win.",
            "{h} made so many funny faces that {f} had to laugh.",
        ),
        (
            '"I feel better already," said {f}.',
            "{f}'s cheeks turned red again, and {f.he} sat up in bed.",
            "The next morning, {f} was well, and the first thing {f.he} did was to thank {h}.",
        ),
    ),
    (
        "A good friend is the best medicine of all.",
        "A week later, {both} played outside again.",
        "{h} was glad that {h.he} could help.",
        "And when {h} caught a cold in the winter, {f} came to visit {h.him}, too.",
    ),
    {"soup": ("carrot", "pea", "potato", "tomato", "pumpkin"),
     "picture": ("a flying horse", "a green dragon", "a ship on the sea", "a giant with a tiny hat", "a dancing bear",
                 "a castle in the clouds", "a whale")},
    optional=(1, 5),
)  # fmt: skip

WISHES = Plot(
    "too much",
    (
        (
            "{When}, {f} brought {sweet} {p.to} for all {f.his} friends.",
            "{When}, {h} and {f} came {p.to} with {sweet} for everyone.",
            "{When}, {h.his} {g} left {sweet} on the table for {h} and {f}.",
        ),
        (
            '"Let us take only a few," said {f}. But {h} wanted all of them.',
            "{f} ate two or three. {h} ate and ate and did not stop.",
            '"That is enough," {f} told {h.him}. But {h.he} took one more, and one more, and one more.',
        ),
        (
            "In the end, there was nothing left for the others, and {h}'s tummy hurt.",
            "Soon {h} felt sick. {h.He} lay down and held {h.his} tummy.",
            '"Oh, my tummy!" {h} cried. {h.He} could not walk home.',
        ),
    ),
    (
        (
            "{f} was a good friend. {f.He} brought {h.him} a cup of tea.",
            "{f} stayed with {h.him} and stroked {h.his} head.",
            "{f} ran to get {h}'s {g}, and {g.he} put {h.him} to bed.",
        ),
        (
            '"I should have listened to you," {h} said.',
            "{h} was ashamed. \"I was greedy,\" {h.he} said, \"and I am sorry.\"",
            '"Next time I will think of the others," said {h}.',
        ),
        (
            "The next day, when {h} was well again, {h.he} filled {t.a} with {fruit} and gave it to {f}.",
            "As soon as {h.he} felt better, {h} picked {fruit} and took them to {f} in {t.a}.",
        ),
        (
            '"Thank you!" said {f}. "But we will eat them slowly!" Both of them laughed.',
            "{f} smiled and gave {h} the first one.",
            '"You did not have to do that," {f} said, but {f.he} was pleased.',
        ),
    ),
    (
        "After that, {h} always stopped when {h.he} had enough.",
        "{h} had learned that more is not always better.",
        "They shared everything, and it was just right.",
        "From that day on, {h} listened to {h.his} clever friend.",
    ),
    {"sweet": ("a big bowl of cherries", "a whole bag of nuts", "a basket of sweet berries", "a plate of cookies",
               "a box of little cakes"),
     "fruit": ("plums", "strawberries", "pears", "apples", "grapes", "peaches")},
    optional=(3, 6),
    things=("basket", "bowl", "bag", "box"),
    looks=("red", "blue", "green", "big", "yellow", "pretty", "round", "brown"),
)  # fmt: skip

FRIENDS_PLOTS = (QUARREL, SURPRISE, LOST_WAY, ILL, WISHES)
