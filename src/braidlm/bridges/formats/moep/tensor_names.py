"""What the tensors of a MoEP checkpoint are by their names, which differ between versions of the code."""

import re
from dataclasses import dataclass

WRAPPERS = r"^(?:(?:module|_orig_mod|transformer|model|moep|backbone|decoder)\.)+"
"""Prefixes that training and outer classes add to every name."""
ATTENTION = r"(?:(?:self_)?att(?:n|ention)|mha)"
FEED = r"(?:mlp|ffn?|feed_?forward|feed)"
OUTSIDE = r"(?:[A-Za-z_]+\.)*?"
INSIDE = r"(?P<container>.+?)\."
FED = rf"{INSIDE}(?:{FEED}\.)?"
KIND = r"(?P<kind>weight|bias)"
LAYER = r"(?:\.(?:linear|proj|projection|gate|layer|fc))?"

PATTERNS = (
    ("positions", rf"{OUTSIDE}(?:wpe|pos(?:ition)?s?_emb\w*|positions?)\.{KIND}"),
    ("embedding", rf"{OUTSIDE}(?:wte|tok(?:en)?s?_emb\w*|embed_tokens|word_emb\w*|embeddings?|emb)\.{KIND}"),
    ("last norm", rf"{OUTSIDE}(?:ln_f|ln_final|final_(?:layer_?)?norm|norm_f|final_ln|norm)\.{KIND}"),
    ("head", rf"{OUTSIDE}(?:lm_head|head|output_head)\.{KIND}"),
    ("router", rf"(?P<container>.*?(?:router|gating)s?(?:_[a-z]+|\.\d+)?){LAYER}\.{KIND}"),
    ("router", rf"(?P<container>.+?\.gate)\.(?:linear|proj|layer|fc)\.{KIND}"),
    (
        "norm 1",
        rf"{INSIDE}(?:ln_?1|norm_?1|att(?:n|ention)_(?:layer_?)?norm|input_layernorm|ln_att(?:n|ention))\.{KIND}",
    ),
    ("norm 2", rf"{INSIDE}(?:ln_?2|norm_?2|{FEED}_(?:layer_?)?norm|post_attention_layernorm|ln_{FEED})\.{KIND}"),
    ("qkv", rf"{INSIDE}{ATTENTION}\.(?:(?:c_attn|qkv|qkv_proj|w_?qkv)\.|in_proj_){KIND}"),
    ("query", rf"{INSIDE}{ATTENTION}\.(?:q|query|q_proj|w_?q|q_linear|to_q)\.{KIND}"),
    ("key", rf"{INSIDE}{ATTENTION}\.(?:k|key|k_proj|w_?k|k_linear|to_k)\.{KIND}"),
    ("value", rf"{INSIDE}{ATTENTION}\.(?:v|value|v_proj|w_?v|v_linear|to_v)\.{KIND}"),
    ("attention out", rf"{INSIDE}{ATTENTION}\.(?:c_proj|out_proj|o_proj|proj|out|w_?o|to_out)\.{KIND}"),
    ("gate and up", rf"{FED}(?:gate_up|gate_up_proj|w12)\.{KIND}"),
    ("gate", rf"{FED}(?:gate|gate_proj|w_?gate|c_gate)\.{KIND}"),
    ("up", rf"{FED}(?:up|up_proj|w_?up|c_fc|fc_in)\.{KIND}"),
    ("down", rf"{FED}(?:down|down_proj|w_?down|fc_out)\.{KIND}"),
    ("down", rf"{INSIDE}{FEED}\.(?:c_proj|out_proj|proj|out)\.{KIND}"),
    ("numbered", rf"{FED}(?:w|fc_?|linear_?|lin_?)(?P<number>\d)\.{KIND}"),
    ("numbered", rf"{INSIDE}{FEED}\.(?:net\.|layers\.)?(?P<number>\d)\.{KIND}"),
    ("linear", rf"(?P<container>.+?\.\d+)(?:\.(?:linear|proj|projection|fc|layer|0))?\.{KIND}"),
)
"""Parts and their possible names, tried in this order; for `numbered` matrices the shapes show which part they are."""
BUFFERS = rf".*{ATTENTION}\.(?:bias|mask|tril|causal_mask|masked_bias)|(?:.*\.)?position_ids"
"""Constants that some versions stored; `attn.bias` is a mask, since a layer's bias has the layer's name in it."""
BLOCK_PARTS = {"norm 1", "norm 2", "qkv", "query", "key", "value", "attention out"}
"""Parts that only blocks have."""
EXPERTS = r"(?:experts?|projections?|projs|linears|ffns|mlps)"
BARE = r"(?:^|(?<=[._]))(?:routers?|gat(?:e|es|ing)|experts?)(?:$|(?=[._]))"


@dataclass(frozen=True)
class NamedTensor:
    """A tensor as its name describes it."""

    container: str
    """The name of the block, expert or router that it belongs to; empty for the embeddings, last norm and head."""
    part: str
    kind: str
    """`weight` or `bias`."""
    number: int | None = None
    """The number of a numbered part."""


def read_name(name: str) -> NamedTensor | None:
    """What a tensor is, or None if its name matches no part."""
    bare = re.sub(WRAPPERS, "", name)
    for part, pattern in PATTERNS:
        if match := re.fullmatch(pattern, bare):
            groups = match.groupdict()
            container = groups.get("container") or ""
            number = None if groups.get("number") is None else int(groups["number"])
            if part == "gate" and not _is_feed_gate(bare, container):
                part, container = "router", f"{container}.gate"
            return NamedTensor(container, part, groups["kind"], number)
    return None


def is_buffer(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a stored tensor is a constant that carries nothing learned."""
    return len(shape) != 1 and bool(re.fullmatch(BUFFERS, name))


def bare_name(container: str) -> str:
    """The name that a router and its bank share: `shrink` for `shrink.experts`, `router_shrink` and the like."""
    return "_".join(word for word in re.split(r"[._]+", re.sub(BARE, "", container)) if word)


def number_of(container: str) -> int:
    """The last number in a name, which is the index in a list; -1 if there is none."""
    numbers = re.findall(r"\d+", container)
    return int(numbers[-1]) if numbers else -1


def list_of(container: str) -> str:
    """The name of the list that contains a module: its own name without the number at the end."""
    return re.sub(r"\.\d+$", "", container)


def _is_feed_gate(name: str, container: str) -> bool:
    """Whether `gate` is a feed-forward's, which it is inside one or inside a numbered expert; else it is a router."""
    return bool(re.search(rf"\.{FEED}\.gate|gate_proj|w_?gate|c_gate", name)) or bool(
        re.search(rf"(?:^|[._]){EXPERTS}\.\d+$", container)
    )
