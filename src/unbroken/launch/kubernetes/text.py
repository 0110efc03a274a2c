"""A manifest as text: YAML in a fixed order, with a line above what a person might change or wonder about."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import yaml

from unbroken.launch.kubernetes.documents import documents
from unbroken.launch.kubernetes.options import ManifestOptions
from unbroken.quoting.yaml import comment, dumped

_SUSPEND: Final = {
    "job": '{"spec":{"suspend":%s}}',
    "jobset": '{"spec":{"suspend":%s}}',
    "pytorchjob": '{"spec":{"runPolicy":{"suspend":%s}}}',
}


def manifest(options: ManifestOptions, source: str) -> str:
    """The whole manifest; ``source`` is the command that makes it again."""
    told: set[str] = set()
    pieces = (_with_remarks(dumped(document), _remarks(options), told) for document in documents(options))
    return _head(options, source) + "".join(f"---\n{piece}" for piece in pieces)


def _head(options: ManifestOptions, source: str) -> str:
    patch = f"kubectl patch {options.kind} {options.name} --type merge -p"
    place = f" -n {options.namespace}" if options.namespace else ""
    delete = f"kubectl delete {options.kind} {options.name}{place}"
    lines = [
        f"Made by: {source}",
        f"start                  kubectl apply{place} -f FILE",
        f"save and stop          {patch}{place} '{_SUSPEND[options.kind] % 'true'}'",
        f"go on                  {patch}{place} '{_SUSPEND[options.kind] % 'false'}'",
        f"go on after a failure  {delete} && kubectl apply{place} -f FILE",
    ]
    if options.storage is not None:
        lines.append("The claim below holds the run: kubectl delete -f FILE would delete it too.")
    return "".join(map(comment, lines))


def _remarks(options: ManifestOptions) -> dict[str, str]:
    """What is said above a key, the first time it comes."""
    by_restarts = {
        "job": "Crashes, over the whole life of the run; a clean stop and a lost machine are not counted.",
        "jobset": "One crash is enough here: all nodes are then started together, which failurePolicy counts.",
        "pytorchjob": "",
    }
    remarks = {
        "image": "A digest (name@sha256:...) instead of a tag keeps every pod of the run on the same bits.",
        "terminationGracePeriodSeconds": f"From SIGTERM to SIGKILL: {options.grace.because}.",
        "podFailurePolicy": "2 3 4 5 6 8: a person decides. 75 or a lost machine: go on, and do not count it.",
        "backoffLimit": by_restarts[options.kind],
        "podReplacementPolicy": "No second pod while the first one still saves.",
        "maxRestarts": "Crashes, over the whole life of the run, each of which starts all nodes again.",
        "runPolicy": "",
        "restartPolicy": (
            "An exit code of 128 or more starts the pod again, a lower one ends it for a person to look at."
            if options.kind == "pytorchjob"
            else ""
        ),
        "workingDir": "The volume: a relative run directory or data path is looked for here.",
        "sizeLimit": "NCCL and data workers share memory; the default of 64 MiB is too little for them.",
        "envFrom": "Secrets are named, never written here.",
        "accessModes": "The run directory is shared by all nodes." if options.nodes > 1 else "",
    }
    return {key: remark for key, remark in remarks.items() if remark}


def _with_remarks(text: str, remarks: Mapping[str, str], told: set[str]) -> str:
    """The text with each remark above the first line that has its key; ``told`` are those that were said before."""
    above: dict[int, str] = {}
    for key in _keys(yaml.compose(text, Loader=yaml.SafeLoader)):
        name = str(key.value)
        if name in remarks and name not in told:
            told.add(name)
            line = text.splitlines()[key.start_mark.line]
            # Of the first key of a list's item the dash goes first: the remark stands where the item does.
            above[key.start_mark.line] = " " * (len(line) - len(line.lstrip())) + comment(remarks[name]).rstrip()
    lines = ([above[number], line] if number in above else [line] for number, line in enumerate(text.splitlines()))
    return "\n".join(each for pair in lines for each in pair) + "\n"


def _keys(node: yaml.Node | None) -> Iterator[yaml.Node]:
    children: Sequence[yaml.Node] = ()
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield from _keys(value)
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    for child in children:
        yield from _keys(child)
