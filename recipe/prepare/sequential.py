"""Whether a chat template prints message after message, so that the text of a conversation begins with the text of
each of its beginnings. Decided from the template's code; in doubt the answer is no, which costs only time."""

from __future__ import annotations

from jinja2 import nodes

_LOOP_FACTS = {"first", "index", "index0"}  # of a loop, what does not depend on how many messages follow
# Carry something from one message to the next, or differ at each call.
_STATEFUL_NAMES = {"namespace", "cycler", "joiner", "lipsum", "self", "caller", "context", "documents"}
_LAZY_FILTERS = {"map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "groupby", "random"}
_ALLOWED = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.Name, nodes.Const),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Filter, nodes.Test, nodes.Compare, nodes.Operand),
    *(nodes.BinExpr, nodes.UnaryExpr, nodes.CondExpr, nodes.Concat, nodes.Call, nodes.Keyword),
    *(nodes.List, nodes.Dict, nodes.Pair, nodes.Tuple),
)


def is_sequential(template: nodes.Template) -> bool:
    """True when the template is a head, one loop ``for NAME in messages``, and a tail, such that

    - nothing outside of that loop's header reads ``messages`` other than as ``messages[0]``;
    - no message's text depends on later messages, on a generation prompt, or on state kept from earlier messages.

    Then the text of k messages is what is printed before the loop asks for message k, and the tail.
    """
    loops = [node for node in template.body if isinstance(node, nodes.For) and _is_messages(node.iter)]
    if len(loops) != 1:
        return False
    (loop,) = loops
    if loop.recursive or loop.test or loop.else_ or not isinstance(loop.target, nodes.Name):
        return False
    if not all(isinstance(node, _ALLOWED) for node in template.find_all(nodes.Node)):
        return False
    return _reads_forward(template, loop) and not _prompts_early(template, loop)


def _is_messages(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "messages"


def _reads_forward(template: nodes.Template, loop: nodes.For) -> bool:
    fine = {id(loop.iter)}
    for item in template.find_all(nodes.Getitem):
        if _is_messages(item.node) and isinstance(item.arg, nodes.Const) and item.arg.value == 0:
            fine.add(id(item.node))
    for fact in template.find_all(nodes.Getattr):
        if isinstance(fact.node, nodes.Name) and fact.node.name == "loop" and fact.attr in _LOOP_FACTS:
            fine.add(id(fact.node))
    for name in template.find_all(nodes.Name):
        if name.name in {"messages", "loop"} and id(name) not in fine:
            return False
        if name.name in _STATEFUL_NAMES:
            return False
    return not any(used.name in _LAZY_FILTERS for used in template.find_all(nodes.Filter))


def _prompts_early(template: nodes.Template, loop: nodes.For) -> bool:
    """Whether the generation prompt has a say in the head or in the loop."""
    upto = template.body[: template.body.index(loop) + 1]
    return any(
        name.name == "add_generation_prompt" for node in upto for name in [*node.find_all(nodes.Name), *_itself(node)]
    )


def _itself(node: nodes.Node) -> list[nodes.Name]:
    return [node] if isinstance(node, nodes.Name) else []
