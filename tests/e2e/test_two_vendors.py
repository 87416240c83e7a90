"""Two vendors in one Ray cluster: each actor is what its own node is, and data goes from one chip to the other."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(300)

PLUGIN = """
import verl_fl
from verl_fl.testing.simulated.vendors import SimX, SimY
verl_fl.register(SimX)
verl_fl.register(SimY)
"""
DRIVER = """
import os, sys, ray
resources = {"SIMX": 4, "SIMY": 2}
ray.init(address="local", num_cpus=4, resources=resources, include_dashboard=False, _temp_dir=sys.argv[1])

class Actor:
    def __init__(self):
        from verl.plugin.platform import get_platform
        self.platform = get_platform()

    def about(self):
        return self.platform.name, self.platform.device_count(), self.platform.process_group_backend()

    def double(self, values):
        import torch
        return (torch.tensor(values).to(self.platform.current_device()) * 2).cpu().tolist()

def on(name):  # the environment that a node of this vendor gives its workers
    env = {"env_vars": {"VERL_FL_SIMULATED": name}}
    return ray.remote(Actor).options(resources={name.upper(): 1}, runtime_env=env).remote()

x, y = on("simx"), on("simy")
print(ray.get([x.about.remote(), y.about.remote()]))
print(ray.get(y.double.remote(x.double.remote([1.0, 2.5]))))
ray.shutdown()
"""


def test_two_simulated_vendors_in_one_cluster(tmp_path):
    package = tmp_path / "site"
    info = package / "two_vendors-1.0.dist-info"
    info.mkdir(parents=True)
    (package / "two_vendors.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: two-vendors\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\ntwo_vendors = two_vendors\n")
    code = tmp_path / "driver.py"
    code.write_text(DRIVER)
    env = {**os.environ, "PYTHONPATH": str(package), "HF_HUB_OFFLINE": "1"}
    ray_folder = f"/tmp/vfl2-{os.getpid()}"
    done = subprocess.run(
        [sys.executable, str(code), ray_folder], env=env, capture_output=True, text=True, cwd=tmp_path, timeout=240
    )
    subprocess.run(["rm", "-rf", ray_folder], check=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    about, doubled = done.stdout.strip().splitlines()[-2:]
    assert about == "[('simx', 4, 'cpu:gloo,simx:simxccl'), ('simy', 2, 'cpu:gloo,simy:simyccl')]"
    assert doubled == "[4.0, 10.0]"
