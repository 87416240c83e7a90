"""The one message that a failed run shows, out of the logs that verl, Hydra and Ray really print."""

import pytest

from verl_fl.cli import cause

RAY = """\
\x1b[36m(TaskRunnerV1 pid=123)\x1b[0m INFO: ready
\x1b[36m(WorkerDict pid=9)\x1b[0m Traceback (most recent call last):
\x1b[36m(WorkerDict pid=9)\x1b[0m KeyError: 'a worker that was killed on the way out'
Error executing job with overrides: ['+fl=cpu', 'data.train_batch_size=16']
Traceback (most recent call last):
  File "/x/main_ppo.py", line 184, in main
    run_ppo(config)
ray.exceptions.RayTaskError(ValueError): \x1b[36mray::TaskRunnerV1.run()\x1b[39m (pid=123, ip=10.0.0.1)
  File "/x/main_ppo.py", line 140, in run
    self.trainer.fit()
ray.exceptions.RayTaskError(ValueError): ray::WorkerDict.step() (pid=9, ip=10.0.0.1)
  File "/x/reward.py", line 3, in compute_score
    raise ValueError("no such label")
ValueError: reward 3 is no number
  asked: a float
  do: return a float

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
\x1b[36m(TaskRunnerV1 pid=123)\x1b[0m Traceback (most recent call last):
\x1b[36m(TaskRunnerV1 pid=123)\x1b[0m OSError: a DataLoader worker was killed
Exception ignored in: <function X.__del__ at 0x1>
Traceback (most recent call last):
  File "/x/y.py", line 1, in __del__
TypeError: 'NoneType' object is not callable
"""

CONFIG = """\
Could not override 'actor.foo'.
To append to your config use +actor.foo=1
Key 'foo' is not in struct
    full_key: actor.foo
    object_type=dict

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
"""

CHAINED = """\
Traceback (most recent call last):
  File "a.py", line 1, in f
KeyError: 'x'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 3, in f
verl_fl.errors.PlacementError: no node has fl_cpu
  do: start more
"""

ONLY_A_WORKER = """\
\x1b[36m(WorkerDict pid=9)\x1b[0m Traceback (most recent call last):
\x1b[36m(WorkerDict pid=9)\x1b[0m   File "a.py", line 1, in f
\x1b[36m(WorkerDict pid=9)\x1b[0m RuntimeError: out of room
Killed
"""


def test_the_innermost_message_is_shown_whole_and_without_rays_layers():
    found = cause.find(RAY)
    assert found.kind == "ValueError"
    assert found.message == "reward 3 is no number\n  asked: a float\n  do: return a float"


def test_a_mistake_in_the_config_is_shown_though_hydra_prints_no_traceback():
    found = cause.find(CONFIG)
    assert found.kind == "config"
    assert "Could not override 'actor.foo'" in found.message and "Key 'foo'" in found.message


def test_of_a_chain_the_last_exception_is_the_one_that_was_meant_for_the_user():
    assert cause.find(CHAINED) == cause.Cause(kind="PlacementError", message="no node has fl_cpu\n  do: start more")


def test_a_worker_is_asked_when_the_driver_says_nothing():
    assert cause.find(ONLY_A_WORKER) == cause.Cause(kind="RuntimeError", message="out of room")


@pytest.mark.parametrize(("log", "words"), [("", "nothing was printed"), ("one\ntwo\n", "two")])
def test_a_log_without_an_exception_gives_its_last_lines(log, words):
    found = cause.find(log)
    assert found.kind == "no exception in the log"
    assert words in found.message
