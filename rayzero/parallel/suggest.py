"""A plan to start from, for a module that ships none: read off names, kinds and sizes."""

import re
from collections import Counter, defaultdict

from torch import nn

from rayzero.config.parallel import Style
from rayzero.parallel.plan import Plan


def suggested_plan(module: nn.Module) -> Plan:
    """Guess: below one module, the last linear that returns to the hidden width is row, the linears
    that read it are column; the largest table and what ends in its rows are vocab."""
    tables = {n: m for n, m in module.named_modules() if isinstance(m, nn.Embedding)}
    linears = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    table = max(tables.values(), key=lambda t: t.num_embeddings, default=None)
    widths = Counter(linear.in_features for linear in linears.values())
    hidden = table.embedding_dim if table is not None else max(widths, key=widths.__getitem__)
    styles = {name: Style.VOCAB for name, found in tables.items() if found is table}
    siblings: dict[str, dict[str, nn.Linear]] = defaultdict(dict)
    for name, linear in linears.items():
        if table is not None and linear.out_features == table.num_embeddings:
            styles[name] = Style.VOCAB
        else:
            siblings[name.rpartition(".")[0]][name] = linear
    for group in siblings.values():
        styles |= _split_part(group, hidden)
    for name, found in module.named_modules():
        if name and type(found).__name__ in ("CrossEntropy", "CrossEntropyLoss"):
            styles[name] = Style.VOCAB
    return {_pattern(name): style for name, style in styles.items()}


def plan_as_yaml(plan: Plan) -> str:
    """Write a plan as it stands in a config."""
    lines = [f'    "{pattern}": {style.value}' for pattern, style in plan.items()]
    return "\n".join(["parallel:", "  plan:", *lines])


def _split_part(group: dict[str, nn.Linear], hidden: int) -> Plan:
    """Give one part's linears their styles; none where it does not begin and end at the width."""
    rows = [name for name, linear in group.items() if linear.out_features == hidden]
    columns = [name for name, linear in group.items() if linear.in_features == hidden]
    if not rows or not set(columns) - {rows[-1]}:
        return {}
    styles = {name: Style.COLUMN for name in columns if name != rows[-1]}
    return {**styles, rows[-1]: Style.ROW}


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
