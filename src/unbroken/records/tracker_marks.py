"""Which run each tracker shows, by the journal, and the last step it was sent: a line for every batch, a file per job.

A line is written after its steps were sent: a job that is killed in between has sent more than it says. Where a tracker
can tell what it has stored, that counts.
"""

from collections.abc import Callable, Collection, Iterable

from unbroken.files import LOCAL, Files
from unbroken.records.journal import Event
from unbroken.records.jsonl import LineWriter, TornLines, job_file, jobs_in, read_lines
from unbroken.records.layout import Layout
from unbroken.store.fields import as_whole


class TrackerMarks:
    """The marks that one job writes; any thread may call it."""

    def __init__(self, layout: Layout, job: int, files: Files = LOCAL) -> None:
        self._lines = LineWriter(job_file(layout.trackers, job), files, within=layout.run)

    def writer(self, tracker: str, run_id: str) -> Callable[[int], None]:
        """A function that writes the mark of one tracker; it raises ``StorageFailed`` if the system refuses."""
        return lambda step: self._lines.write([{"tracker": tracker, "id": run_id, "step": step}])

    def close(self) -> None:
        """Give the file back.

        Raises:
            StorageFailed: an I/O error.
        """
        self._lines.close()


def last_marks(layout: Layout, wanted: Collection[tuple[str, str]], files: Files = LOCAL) -> dict[tuple[str, str], int]:
    """The last step sent, by tracker and id of its run, for those that are wanted and were sent to.

    Raises:
        StorageFailed: an I/O error.
    """
    found: dict[tuple[str, str], int] = {}
    # The newest first: usually the job before has sent to all of them, and no older file is read.
    for job in reversed(jobs_in(layout.trackers, files)):
        of_job: dict[tuple[str, str], int] = {}
        for line in read_lines(job_file(layout.trackers, job), TornLines(), files):
            key, step = (line.get("tracker"), line.get("id")), as_whole(line.get("step"))
            if key in wanted and step is not None:
                of_job[str(key[0]), str(key[1])] = step
        found = of_job | found
        if found.keys() >= set(wanted):
            break
    return found


def known_ids(events: Iterable[Event]) -> dict[str, str]:
    """The id of the run that each tracker shows; without those of a past that the run has left."""
    ids: dict[str, str] = {}
    for event in events:
        if event.kind == "resume" and event.values.get("abandoned"):
            ids.clear()
        name, run_id = event.text("tracker"), event.text("id")
        if event.kind == "tracker" and name and run_id:
            ids[name] = run_id
    return ids
