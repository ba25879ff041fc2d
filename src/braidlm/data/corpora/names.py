"""The people of the built-in corpora: first names with one gender, none of which is also a common word."""


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


GIRLS = words(
    "Lily Mia Anna Emma Sara Ella Lucy Zoe Nora Clara Alice Amy Julia Maya Ruby Sophie Hannah Leah Eva Molly Nina "
    "Olivia Rosa Tina Wendy Kate Jane Ida Elsa Greta Heidi Polly Betty Carla Dora Fiona Gina Helen Jenny Kim Laura "
    "Mary Nelly Paula Sally Tara Vera Wanda Zara Bella"
)

BOYS = words(
    "Tom Ben Max Sam Leo Tim Jack Noah Adam Finn Oscar Peter Henry Luke Paul Oliver Hugo Jacob Liam Ethan Felix "
    "George Daniel David Simon Martin Victor Walter Eric Fred Gary Harry Ivan Joe Karl Lucian Milo Ned Otto Pablo "
    "Ralph Robert Steve Theo Toby Tony Vincent Billy Kevin Andrew"
)

NAMES = tuple((name, "she") for name in GIRLS) + tuple((name, "he") for name in BOYS)
"""(name, pronoun)."""

FORMS = {
    "he": ("he", "him", "his", "his", "himself"),
    "she": ("she", "her", "her", "hers", "herself"),
    "it": ("it", "it", "its", "its", "itself"),
}
"""Subject, object, possessive before a noun, possessive alone, reflexive."""
