"""``Run``, and what happens around each step of a training loop, in this order.

- ``run``: the object a script holds; ``settings``: how it saves, resumes and stops; ``console``: its lines on stderr.
- ``opening``: takes the lease, audits the objects and resumes; ``resume``: chooses and loads the checkpoint;
  ``job_start``: what is logged and journalled then; ``open_run``: what the job holds from then on, and how it closes.
- ``job``: enters and leaves the loop. ``step_body``: what a step has changed; ``carry``: values taken to the next step;
  ``logged_metrics``: what it logged; ``loop_checks``: warns about loops that would not resume exactly.
- ``edge``: a step's edge, where a save or a stop is decided; ``votes``: how the ranks agree on it; ``save_clock``:
  when a checkpoint is due; ``save_result``: how a save ended. Stop signals arrive in ``unbroken.records.stop``.
- ``emergency``: the dump when there is no time for a save; ``peers``: which rank failed first; ``loader_workers``:
  keeps stop signals from loader workers; ``recorder``: journal, metrics, snapshot and outcome.
"""
