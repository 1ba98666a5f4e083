"""docs/pipeline.md: components of ours in somebody's own pipeline."""

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_the_pipeline_of_the_page_compiles(tmp_path):
    (program,) = re.findall(r"```python\n# own\.py\n(.*?)```", (ROOT / "docs" / "pipeline.md").read_text(), flags=re.S)
    (tmp_path / "own.py").write_text(program)
    environment = {**os.environ, "KFTRAIN_STEPS_IMAGE": "registry.example/steps:0.2.0"}
    subprocess.run([sys.executable, "own.py"], cwd=tmp_path, env=environment, check=True)
    spec, platform = yaml.safe_load_all((tmp_path / "own.yaml").read_text())
    tasks = spec["root"]["dag"]["tasks"]
    assert tasks.keys() == {"train", "evaluate", "announce"}
    assert tasks["evaluate"]["inputs"]["parameters"]["run_uri"]["taskOutputParameter"]["producerTask"] == "train"
    images = {name: step["container"]["image"] for name, step in spec["deploymentSpec"]["executors"].items()}
    assert images["exec-train"] == images["exec-evaluate"] == "registry.example/steps:0.2.0"
    assert images["exec-announce"] == "python:3.11-slim"
    settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert settings["exec-train"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert {each["secretName"] for each in settings["exec-train"]["secretAsEnv"]} == {
        "kftrain-storage",
        "kftrain-mlflow",
    }
    assert "KUBERNETES_TOLERATIONS" in {
        each["field"] for each in spec["components"]["comp-train"]["taskConfigPassthroughs"]
    }
