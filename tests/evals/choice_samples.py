"""Made-up rows of the multiple-choice data sets: as the Hub has them, and with prompts ready."""

from typing import Any

Rows = list[dict[str, Any]]

HUB_ROWS: dict[str, Rows] = {
    "arc_easy": [
        {
            "id": "1",
            "question": "What falls from clouds?",
            "choices": {"text": ["rain", "sand", "light"], "label": ["A", "B", "C"]},
            "answerKey": "A",
        },
        {
            "id": "2",
            "question": "Which is hot?",
            "choices": {"text": ["ice", "the sun"], "label": ["1", "2"]},
            "answerKey": "2",
        },
    ],
    "winogrande": [
        {"sentence": "Ann thanked Bea because _ had helped.", "option1": "Ann", "option2": "Bea", "answer": "2"},
        {"sentence": "The box fits the bag as the _ is big.", "option1": "box", "option2": "bag", "answer": "2"},
    ],
    "hellaswag": [
        {
            "activity_label": "Baking",
            "ctx_a": "[header] How to bake [title] Heat the oven.",
            "ctx_b": "then you",
            "endings": ["mix the dough.", "[substeps] fly away.", "sing  a song.", "sleep."],
            "label": "0",
        }
    ],
    "piqa": [{"goal": "Dry a cup", "sol1": "use a towel", "sol2": "use water", "label": 0}],
    "openbookqa": [
        {
            "question_stem": "Plants need",
            "choices": {"text": ["light", "coal", "noise", "glass"], "label": ["A", "B", "C", "D"]},
            "answerKey": "A",
        }
    ],
    "boolq": [{"passage": "Cats are animals.", "question": "is a cat an animal", "label": 1}],
    "lambada": [{"text": 'He took his hat. "Nice hat," she said to the hat'}, {"text": "One two, one two"}],
    "mmlu": [
        {
            "question": " What is 1 + 1? ",
            "subject": "abstract_algebra",
            "choices": ["1", "2", "3", "4"],
            "answer": 1,
        },
        {
            "question": "What is 0 + 1?",
            "subject": "abstract_algebra",
            "choices": ["1", "2", "3", "4"],
            "answer": 0,
        },
    ],
    "wikitext2": [
        {
            "page": " = Cats = \n \n Cats sleep ( a lot ) , 1 @,@ 000 hours . "
            'The cat \'s " bed " is soft @-@ ish . \n \n'
            " = = Food = = \n \n They eat [ fish ] ; always ! \n"
        },
        {"page": " = Dogs = \n \n Dogs bark . \n"},
    ],
}
HUB_ROWS["arc_challenge"] = HUB_ROWS["arc_easy"]
HUB_ROWS["mmlu_continuation"] = HUB_ROWS["mmlu_5shot"] = HUB_ROWS["mmlu"]

READY_ROWS: dict[str, Rows] = {
    "arc_easy": [
        {"query": "Question: What falls from clouds?", "choices": ["rain", "sand", "light"], "gold": 0},
        {"query": "Question: Which is hot?", "choices": ["ice", "the sun"], "gold": 1},
    ],
    "winogrande": [
        {
            "context_options": ["Ann thanked Bea because Ann", "Ann thanked Bea because Bea"],
            "continuation": "had helped.",
            "gold": 1,
        },
        {
            "context_options": ["The box fits the bag as the box", "The box fits the bag as the bag"],
            "continuation": "is big.",
            "gold": 1,
        },
    ],
    "piqa": [{"query": "Question: Dry a cup\n", "choices": ["use a towel", "use water"], "gold": 0}],
    "openbookqa": [{"query": "Plants need", "choices": ["light", "coal", "noise", "glass"], "gold": 0}],
    "boolq": [
        {
            "query": "Passage: Cats are animals.\nQuestion: is a cat an animal?",
            "choices": ["no", "yes"],
            "gold": 1,
        }
    ],
    "lambada": [
        {"context": 'He took his hat. "Nice hat," she said to the', "continuation": "hat"},
        {"context": "One two, one", "continuation": "two"},
    ],
}
