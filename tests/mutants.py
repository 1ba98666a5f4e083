"""Breaks the product, one line at a time, and fails where no test notices: `make mutants`, or with names of mutants.

Each mutant names what it breaks and the tests that must turn red. It is applied to a copy of the repository; a text
that is no longer there is an error, and so are tests that are red before anything is broken, so that this list stays
true.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
COPIED = ("kftrain", "components", "pipelines", "tests", "examples", "docs", "images", "manifests", "pyproject.toml")
NUM_AT_ONCE = 2


@dataclass(frozen=True)
class Mutant:
    """One break."""

    name: str
    path: str
    before: str
    """A text that the file holds exactly once."""
    after: str
    tests: str
    """Arguments of pytest."""


MUTANTS = [
    Mutant(
        "a document that is nested deeply overflows its reader",
        "kftrain/core/storage.py",
        "except (ValueError, RecursionError) as cause:",
        "except ValueError as cause:",
        "tests/unit/core/test_storage.py -k is_no_json",
    ),
    Mutant(
        "a chain of URIs is read",
        "kftrain/core/storage.py",
        'if "::" in uri and (',
        'if "::" in uri and uri == "" and (',
        "tests/unit/core/test_storage.py -k chain_of_uris",
    ),
    Mutant(
        "a misspelt attribute is found when the training starts",
        "kftrain/trust.py",
        "if spec and name == module and str(spec.origin)",
        "if False and str(spec.origin)",
        "tests/unit/cli/test_run.py -k named_and_not_there",
    ),
    Mutant(
        "a resumed run needs its source",
        "kftrain/client/local_run.py",
        "() if resume_run else sources",
        "sources",
        "tests/unit/cli/test_run.py -k may_be_there",
    ),
    Mutant(
        "a constant learning rate is warned of for its warm-up",
        "kftrain/stages/preflight.py",
        ' and config.optimizer.schedule != "constant"',
        "",
        "tests/unit/stages/test_model_names.py -k longer_than",
    ),
    Mutant(
        "each worker of a loader gives webdataset all samples",
        "kftrain/data/opened.py",
        "worker, num_workers = (info.id, info.num_workers) if info else (0, 1)",
        "worker, num_workers = (0, 1)",
        "tests/unit/data/test_own_loops.py -k ranks_and_their_workers",
    ),
    Mutant(
        "a worker that is spawned forgets the rank it belongs to",
        "kftrain/data/opened.py",
        "self._process if info else (0, 1))",
        "(0, 1))",
        "tests/unit/data/test_own_loops.py -k ranks_and_their_workers",
    ),
    Mutant(
        "a damaged shard is read the second time",
        "kftrain/data/dataset.py",
        "                reader = ShardReader(",
        "                reader = self._open[number] = ShardReader(",
        "tests/unit/data/test_own_loops.py -k no_sample_of_a_damaged_shard",
    ),
    Mutant(
        "groups whose samples are left out are kept",
        "kftrain/data/dataset.py",
        "itertools.compress(keys, self._group_rows)",
        "itertools.islice(keys, self.num_groups)",
        "tests/unit/data/test_bad_validation_samples.py -k within_the_budget",
    ),
    Mutant(
        "an answer of another length is taken for what was asked for",
        "kftrain/core/remote.py",
        "        if len(content) != num_bytes:\n",
        "        if len(content) < 0:\n",
        "tests/unit/data/shards/test_wrong_answers.py -k 'ignored_range or page_or_a_shortened'",
    ),
    Mutant(
        "a short answer is the content of a whole object",
        "kftrain/core/remote.py",
        'return self._require_whole(self._call("cat_file", num_bytes=size), size)',
        'return bytes(self._call("cat_file", num_bytes=size))',
        "tests/unit/core/test_remote_storage.py -k less_than",
    ),
    Mutant(
        "a short answer about an object says that others have created it",
        "kftrain/core/remote.py",
        "                existing = self.read()\n",
        '                existing = self._call("cat_file")\n',
        "tests/unit/core/test_remote_storage.py -k less_than",
    ),
    Mutant(
        "every process has a clock for checkpoints",
        "kftrain/train/saves.py",
        "return self._tells and 0 <",
        "return 0 <",
        "tests/unit/train/test_loop.py -k by_the_clock",
    ),
    Mutant(
        "the clock makes the next checkpoint wait for nothing",
        "kftrain/train/saves.py",
        "        self._last_start = monotonic()\n        self._writer",
        "        self._writer",
        "tests/unit/train/test_loop.py -k by_the_clock",
    ),
    Mutant(
        "what is to be kept for good is deleted",
        "kftrain/run/commit.py",
        "(keep_every and name.step % keep_every == 0)",
        "(keep_every and name.step == keep_every)",
        "tests/unit/run/test_commit.py -k kept",
    ),
    Mutant(
        "nobody tells the writer what is kept for good",
        "kftrain/train/loop.py",
        "        writer.keep_every = config.checkpoint.keep_every\n",
        "",
        "tests/unit/train/test_loop.py -k that_stays",
    ),
    Mutant(
        "a command that is told to stop keeps its turn",
        "kftrain/cli/__init__.py",
        "with signals.handle_signals(signals.STOP, _exit), outages",
        "with outages",
        "tests/unit/cli/test_schedule.py -k told_to_stop",
    ),
    Mutant(
        "a run of an earlier window that fails is an alert",
        "kftrain/stages/firing.py",
        " or BACKFILL in key:",
        ":",
        "tests/unit/stages/test_firing.py -k alerts_nobody",
    ),
    Mutant(
        "a run that was deleted has failed",
        "kftrain/stages/firing.py",
        "firing, now, progress, is_gone)",
        "firing, now, progress)",
        "tests/unit/stages/test_firing.py -k 'alerts_nobody or without_a_word'",
    ),
    Mutant(
        "Kubeflow's page says nothing of a recurring run",
        "kftrain/kubeflow/client.py",
        "            description=content.description[:MAX_DESCRIPTION_LENGTH],\n",
        "",
        "tests/unit/cli/test_schedule.py -k kubeflows_page",
    ),
    Mutant(
        "a rank does not say what it scores",
        "kftrain/evaluate/session.py",
        '    print(f"scores {',
        '    len(f"scores {',
        "tests/unit/evaluate/test_rank_logs.py",
    ),
    Mutant(
        "whatever else answers for a store is a change of the data",
        "kftrain/data/shards/verified.py",
        "if storage.is_local(uri) or listed.get(name) == size_bytes:",
        "if True:",
        "tests/unit/data/shards/test_wrong_answers.py -k 'page_or_a_shortened or shifts'",
    ),
    Mutant(
        "a window begins where the one before ends, and its first token is never predicted",
        "kftrain/data/windows.py",
        "starts, length = np.asarray(samples, np.int64) * self._window.stride, self._window.length",
        "starts, length = np.asarray(samples, np.int64) * self._window.length, self._window.length",
        "tests/unit/data/test_token_windows.py",
    ),
    Mutant(
        "a run of tokens that crosses a block is read from the wrong row",
        "kftrain/data/dataset.py",
        "            start += taken\n",
        "            start += taken + 1\n            stop += 1\n",
        "tests/unit/data/test_token_windows.py",
    ),
    Mutant(
        "special tokens in a text lose its bytes",
        "kftrain/tasks/bpe.py",
        "encoder.encode_special_tokens = True",
        "encoder.encode_special_tokens = False",
        "tests/unit/tasks/test_tokenizers.py -k special",
    ),
    Mutant(
        "a token that is guessed right counts as one byte",
        "kftrain/tasks/language_modeling.py",
        "correct = ((guesses == targets) * num_bytes).sum(dim=1)",
        "correct = ((guesses == targets) & (num_bytes > 0)).sum(dim=1)",
        "tests/unit/tasks/test_tokenizers.py -k guessed",
    ),
    Mutant(
        "tokens attend to the document before",
        "kftrain/models/transformer.py",
        "(same & (places.unsqueeze(1) >= places))",
        "(same | (places.unsqueeze(1) >= places))",
        "tests/unit/models/test_transformer.py -k documents",
    ),
    Mutant(
        "an appended dataset trains its tokenizer anew",
        "kftrain/sharding/shard_dataset.py",
        "known = self._read_latest_assets() if self._task.asset_names else {}",
        "known = {}",
        "tests/unit/cli/test_tokenizer.py -k appended",
    ),
    Mutant(
        "gradients are not clipped",
        "kftrain/train/spmd.py",
        "if self._clip_norm > 0:",
        "if self._clip_norm < 0:",
        "tests/unit/train/test_step.py tests/unit/train/test_bare_loop.py",
    ),
    Mutant(
        "a parameter that gets memory loses its hooks",
        "kftrain/parallel/initialize.py",
        "    set_hooks(parameter, *hooks)\n",
        "",
        "tests/distributed/test_parity_hooks.py -k 'ddp and not frozen'",
    ),
    Mutant(
        "a hook is given the gradient of a process's own part",
        "kftrain/parallel/transforms.py",
        "whole = gather_whole(own, parameter.grad)",
        "whole = torch.zeros_like(parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else own)\n"
        "                whole[index_of(parameter.grad)] = own",
        "tests/distributed/test_parity_hooks.py -k 'heard and 2-fsdp or heard and uneven'",
    ),
    Mutant(
        "all processes that split a matrix draw the same dropout for their parts",
        "kftrain/parallel/tensor.py",
        "outside.numpy().tobytes() + str(self._rank).encode()",
        "outside.numpy().tobytes()",
        "tests/distributed/test_parity.py -k dropout",
    ),
    Mutant(
        "a parameter that after_step replaces is not noticed",
        "kftrain/train/step.py",
        "if before.get(name) is not now.get(name)",
        "if False",
        "tests/distributed/test_parity_hooks.py -k replaced",
    ),
    Mutant(
        "what a unit gathers forgets that it is frozen",
        "kftrain/parallel/gradients.py",
        "parameter.requires_grad_(whole.requires_grad)",
        "pass",
        "tests/distributed/test_parity_hooks.py -k 'frozen or thawed'",
    ),
    Mutant(
        "a non-finite step updates all the same",
        "kftrain/train/spmd.py",
        "self.optimizer.step((norm - norm).ne_(0.0))",
        "self.optimizer.step(torch.zeros(()))",
        "tests/unit/train/test_step.py",
    ),
    Mutant(
        "the host waits for each step",
        "kftrain/train/spmd.py",
        "        self.optimizer.step((norm",
        "        if bool(norm >= 0):\n            self.optimizer.step((norm",
        "tests/unit/train/test_spmd.py -k reads_no_number",
    ),
    Mutant(
        "a checkpoint with parts that nobody knows is loaded",
        "kftrain/train/loop.py",
        "        self._engine.state.require_same(loaded.manifest.parts, loaded.uri)\n",
        "",
        "tests/unit/train/test_loop.py",
    ),
    Mutant(
        "gradients of micro batches are summed in the format of the computation",
        "kftrain/parallel/formats.py",
        "copy.grad.to(self._reduce)",
        "copy.grad",
        "tests/unit/parallel/test_formats.py",
    ),
    Mutant(
        "gradients pile up from step to step",
        "kftrain/train/optimizer.py",
        "parameter.grad = None",
        "pass",
        "tests/unit/train/test_step.py",
    ),
    Mutant(
        "AdamW keeps the memory that its parameters had at the first step",
        "kftrain/train/optimizer_kinds.py",
        "        torch._fused_adamw_(\n            [local(parameter) for parameter in parameters],\n",
        "        torch._fused_adamw_(\n"
        "            vars(self).setdefault(str(id(group)), [local(each.detach()) for each in parameters]),\n",
        "tests/unit/train/test_optimizer_adamw.py -k other_memory",
    ),
    Mutant(
        "other memory of a distributed parameter is lost",
        "kftrain/train/step.py",
        "isinstance(arguments[0], DTensor)",
        "False",
        "tests/distributed/test_parity.py -k '2-fsdp and clamped'",
    ),
    Mutant(
        "a sharded model does not look at what a forward does to its parameters",
        "kftrain/parallel/gradients.py",
        "if _memory(whole) != before",
        "if False",
        "tests/distributed/test_parity.py -k 'refused and forward'",
    ),
    Mutant(
        "a mask leaves the heads in groups, which no fused kernel of GPUs takes",
        "kftrain/models/transformer.py",
        "query.is_cpu or (mask is None and query",
        "query.is_cpu or (query",
        "tests/unit/models/test_transformer.py -k grouped_only",
    ),
    Mutant(
        "the weight of rows comes to the device within a step",
        "kftrain/train/spmd.py",
        "norms.begin(tensors.weight)",
        "norms.begin(torch.from_numpy(micro.weight))",
        "tests/unit/train/test_spmd.py -k stay_on_the_device",
    ),
    Mutant(
        "buffers are combined on the host",
        "kftrain/parallel/buffers.py",
        "return buffer.detach().to(wide,",
        'return buffer.detach().to("cpu", wide,',
        "tests/unit/train/test_spmd.py -k stay_on_the_device",
    ),
    Mutant(
        "where rows of a fused matrix go to is found out in each call",
        "kftrain/parallel/tensor_exchange.py",
        "@functools.cache\ndef _compute_routes",
        "def _compute_routes",
        "tests/unit/parallel/test_tensor_exchange.py -k gets_its_rows",
    ),
    Mutant(
        "a training starts with weights of a model with other heads",
        "kftrain/registry/initial_weights.py",
        "    _require_same_options(config, recipe.model)\n",
        "",
        "tests/unit/stages/test_train_from.py -k changes_no_shape",
    ),
    Mutant(
        "gradients are averaged over processes",
        "kftrain/parallel/fully_shard.py",
        "set_gradient_divide_factor(1.0)",
        "set_gradient_divide_factor(2.0)",
        "tests/unit/train/test_bare_loop.py -k two_processes",
    ),
    Mutant(
        "a loss is multiplied by the number of processes, and their sum divided by it",
        "kftrain/train/spmd.py",
        "                loss.backward()  # type: ignore[no-untyped-call]\n",
        "                (loss * self.mesh.world.size).backward()\n"
        "                self._distributed.after_backward = [lambda: [each.grad.div_(self.mesh.world.size)\n"
        "                    for each in self._parameters if each.grad is not None]]\n",
        "tests/distributed/test_parity.py -k '3-fsdp and bf16 and not micro'",
    ),
    Mutant(
        "gradients of a replica are summed in fp32, whatever the configuration says",
        "kftrain/parallel/replicas.py",
        "    small = buffer.to(dtype)\n",
        "    small = buffer\n",
        "tests/distributed/test_parity.py -k 'ddp and sums'",
    ),
    Mutant(
        "copies of a sharded state keep their gradients to themselves",
        "kftrain/parallel/fully_shard.py",
        "            model.set_requires_all_reduce(is_last)\n",
        "            model.set_requires_all_reduce(False)\n",
        "tests/distributed/test_parity.py -k 'hybrid and zero2'",
    ),
    Mutant(
        "parameters stay gathered from one step to the next",
        "kftrain/parallel/fully_shard.py",
        "            model.set_reshard_after_backward(is_last)\n",
        "            model.set_reshard_after_backward(False)\n",
        "tests/distributed/test_parity.py -k '2-zero1 and micro'",
    ),
    Mutant(
        "a replica in bf16 hands its gradients to the casts",
        "kftrain/parallel/replicas.py",
        "lambda master: master.to(self._compute)",
        "lambda master: master.detach().to(self._compute).requires_grad_()",
        "tests/distributed/test_parity.py -k 'ddp and bf16'",
    ),
    Mutant(
        "batch norms divide by the rows of one process",
        "kftrain/parallel/batch_norm.py",
        "count = sums[-1].detach()",
        "count = count.detach()",
        "tests/unit/parallel/test_batch_norm.py",
    ),
    Mutant(
        "rows that fill up a share are in the statistics of batch norms",
        "kftrain/parallel/batch_norm.py",
        "return weight.repeat_interleave(len(x) // len(weight))",
        "return torch.ones(len(x), device=x.device)",
        "tests/unit/parallel/test_batch_norm.py",
    ),
    Mutant(
        "gradients of batch norms' statistics stay on each process",
        "kftrain/parallel/batch_norm.py",
        "return exchange(local, self._peers.sum_over_all, self._peers.sum_over_all)",
        "return exchange(local, self._peers.sum_over_all, lambda gradient: gradient)",
        "tests/unit/parallel/test_batch_norm.py",
    ),
    Mutant(
        "auto forgets the gradients of all micro batches",
        "kftrain/parallel/strategies.py",
        "gathered + (parameter_bytes if accumulates else 0)",
        "gathered",
        "tests/unit/parallel/test_strategies.py",
    ),
    Mutant(
        "the learning rate comes one step late",
        "kftrain/train/loop.py",
        "rate = compute_learning_rate(self._config.optimizer, step, self._config.train.steps)",
        "rate = compute_learning_rate(self._config.optimizer, max(step - 1, 0), self._config.train.steps)",
        "tests/unit/train/test_loop.py",
    ),
    Mutant(
        "the learning rate is never set",
        "kftrain/train/loop.py",
        "        self._engine.set_learning_rate(rate)\n",
        "",
        "tests/unit/train/test_loop.py",
    ),
    Mutant(
        "skipped steps are not counted",
        "kftrain/train/loop.py",
        "0 if math.isfinite(self._gradient_norm) else self._num_nonfinite + 1",
        "0",
        "tests/unit/train/test_loop.py",
    ),
    Mutant(
        "steps are not seeded: dropout differs after a resume",
        "kftrain/train/loop.py",
        "        seed_step(self._config.run.seed, step, mesh.data_rank, mesh.world.device)\n",
        "",
        "tests/unit/train/test_bare_loop.py -k dropout",
    ),
    Mutant(
        "dropout is on while a model is scored",
        "kftrain/models/modes.py",
        "    model.eval()\n",
        "",
        "tests/unit/train/test_bare_loop.py -k dropout",
    ),
    Mutant(
        "what is published is not synced",
        "kftrain/core/storage.py",
        "            stream.write(content)\n            stream.flush()\n            os.fsync(stream.fileno())",
        "            stream.write(content)",
        "tests/unit/checkpoint/test_durability.py",
    ),
    Mutant(
        "a name in a folder is not synced",
        "kftrain/core/storage.py",
        "        os.fsync(descriptor)\n",
        "        pass\n",
        "tests/unit/checkpoint/test_durability.py",
    ),
    Mutant(
        "what is exclusively created replaces what is there",
        "kftrain/core/storage.py",
        "os.link(aside, path)",
        "os.replace(aside, path)",
        "tests/unit/core/test_storage.py",
    ),
    Mutant(
        "COMMITTED comes before the manifest",
        "kftrain/run/commit.py",
        "    storage.publish(storage.join(uri, MANIFEST), content)\n",
        "",
        "tests/unit/run/test_commit.py",
    ),
    Mutant(
        "a fenced attempt commits",
        "kftrain/run/commit.py",
        "    attempts.require_held(paths, name.attempt)\n    storage.publish(storage.join(uri, COMMITTED)",
        "    storage.publish(storage.join(uri, COMMITTED)",
        "tests/unit/run/test_commit.py",
    ),
    Mutant(
        "the other ranks are not asked to end",
        "kftrain/worker/agent.py",
        "        _signal_ranks(running, signal.SIGTERM)\n",
        "",
        "tests/unit/worker/test_agent.py --timeout 40",
    ),
    Mutant(
        "a kept process is not told a task's environment",
        "kftrain/process/kept.py",
        "            os.environ.update(json.loads(line))\n",
        "            pass\n",
        "tests/unit/process/test_kept_process.py",
    ),
    Mutant(
        "exclusive creation believes what the store answers, without comparing the content",
        "kftrain/core/remote.py",
        "            if existing != content:\n",
        "            if True:\n",
        "tests/unit/core/test_storage.py -k race_for_an_object",
    ),
    Mutant(
        "an export is filled from files that its manifest does not list",
        "kftrain/run/export.py",
        'for name in files if name.endswith(".safetensors")',
        'for name in storage.list_names(uri) if name.endswith(".safetensors")',
        "tests/unit/checkpoint/test_hostile_exports.py -k only_the_files",
    ),
    Mutant(
        "an export is filled with bytes that nobody has hashed",
        "kftrain/checkpoint/export.py",
        "return commit.read_verified(storage.join(uri, name), manifest.files[name])",
        "return storage.read_bytes(storage.join(uri, name))",
        "tests/unit/checkpoint/test_hostile_exports.py -k 'bytes_that_are_checked or flipped_bit'",
    ),
    Mutant(
        "tensors are loaded whose digest nobody compares",
        "kftrain/checkpoint/export_tensors.py",
        "if (digest := self._digest.hexdigest()) != self.entry.sha256:",
        "if (digest := self._digest.hexdigest()) == '':",
        "tests/unit/checkpoint/test_export_loading.py -k not_the_one",
    ),
    Mutant(
        "processes that load an export do not look whether a file was changed after it was hashed",
        "kftrain/checkpoint/export_tensors.py",
        "next((name for name in versions if now[name] != versions[name]), None)",
        "None",
        "tests/unit/checkpoint/test_export_loading.py -k after_it_was_hashed",
    ),
    Mutant(
        "of each process's batches the first one stands in the place of all",
        "kftrain/evaluate/score.py",
        "            first = place * batches.size\n",
        "            first = 0\n",
        "tests/unit/evaluate/test_clusters.py",
    ),
    Mutant(
        "numbers of a tensor that no chunk of a checkpoint holds are exported as they come",
        "kftrain/checkpoint/chunks.py",
        "            if num_missing:\n",
        "            if False:\n",
        "tests/unit/checkpoint/test_chunks.py -k missed",
    ),
    Mutant(
        "code that another run's configuration names is imported",
        "kftrain/trust.py",
        "if kind not in built_in and kind not in _permitted and kind",
        "if not kind and kind",
        "tests/unit/test_trust.py",
    ),
    Mutant(
        "the configuration in any run's folder permits code",
        "kftrain/run/config.py",
        "return configuration.parse_kept(text, uri)",
        "return permit(configuration.parse_kept(text, uri))",
        "tests/unit/test_trust.py -k its_job_alone",
    ),
    Mutant(
        "`models --run` permits what the run's configuration names",
        "kftrain/cli/models.py",
        "configuration.parse_kept(saved.to_yaml(), run_uri, overrides)",
        "configuration.parse(saved.to_yaml(), overrides, where=run_uri)",
        "tests/unit/test_trust.py -k models_of_a_run",
    ),
    Mutant(
        "a kept configuration says itself which kinds are trusted",
        "kftrain/trust.py",
        "kinds = filter(_permitted.__contains__, code_of(config))",
        "kinds = code_of(config)",
        "tests/unit/test_trust.py -k trusted_by_nobody_else",
    ),
    Mutant(
        "sums that are no columns of numbers are compared",
        "kftrain/registry/comparison.py",
        "if odd or len({",
        "if len({",
        "tests/unit/registry/test_damaged_statistics.py -k such_a_champion",
    ),
    Mutant(
        "a reference set that the run was not measured on is no obstacle",
        "kftrain/registry/judgement.py",
        "if challenger.lacks_reference else",
        "if False else",
        "tests/unit/registry/test_gate_on_reference.py -k was_not_measured_on",
    ),
    Mutant(
        "a reference set of the run's own data is missing",
        "kftrain/evaluate/reference_set.py",
        "return _read_reference_set(config).evaluation_digest != own_digest",
        "return True",
        "tests/unit/stages/test_reference_set.py -k runs_own_data",
    ),
    Mutant(
        "the name of a parameter is not decoded before it is looked at",
        "kftrain/core/credentials.py",
        "return _SECRET_PARAMETER.search(unquote(text)) is not None",
        "return _SECRET_PARAMETER.search(text) is not None",
        "tests/unit/core/test_credentials.py -k shown_of_a_text",
    ),
    Mutant(
        "a try has any number",
        "kftrain/registry/tries.py",
        "number: Annotated[int, Field(ge=1, le=MAX_NUMBER)]",
        "number: int",
        "tests/unit/registry/test_tries.py -k number_that_none_has",
    ),
    Mutant(
        "a version is champion by its number alone",
        "kftrain/registry/journal.py",
        ' and find_entered_digest(entries, version) in ("", export_digest)\n',
        "\n",
        "tests/unit/registry/test_lost_champion.py -k champions_number",
    ),
    Mutant(
        "a model that may be the one itself is looked into for its reference",
        "kftrain/tracking/session.py",
        'if scheme in ("models", "runs") or scheme',
        "if scheme",
        "tests/unit/registry/test_foreign_versions.py -k place_is_none",
    ),
    Mutant(
        "a damaged entry of the journal may be deleted",
        "kftrain/registry/journal.py",
        "value=error.value, fix=fix) from error",
        "value=error.value, fix=error.fix) from error",
        "tests/unit/registry/test_journal.py -k never_deleted",
    ),
    Mutant(
        "what a promotion that died has promoted is known by its number alone",
        "kftrain/registry/champion_alias.py",
        "(champion is not None and not self.holds(entries, champion))",
        "(champion is not None and not self.exists(champion))",
        "tests/unit/registry/test_lost_champion.py -k promotion_that_died",
    ),
    Mutant(
        "weights are declined by their export alone",
        "kftrain/registry/promotion.py",
        'or "" != decline.content_digest == content',
        "",
        "tests/unit/registry/test_identical.py -k stay_declined",
    ),
    Mutant(
        "weights that were promoted after all stay declined",
        "kftrain/registry/promotion.py",
        "            and not promoted & {decline.export_digest, export_digest}\n",
        "",
        "tests/unit/registry/test_identical.py -k declined_no_more",
    ),
    Mutant(
        "a slice where only the champion has a value is left out",
        "kftrain/registry/comparison.py",
        "return lost | {name",
        "return {name",
        "tests/unit/registry/test_gate_of_slices.py -k champion_has_a_value",
    ),
    Mutant(
        "bounds on the reference set that are no numbers are no regression",
        "kftrain/registry/gate.py",
        "if change is None or isnan(change.low) or isnan(change.high):",
        "if change is None:",
        "tests/unit/registry/test_gate.py -k no_numbers",
    ),
    Mutant(
        "each of many slices is looked at with the confidence of one",
        "kftrain/registry/comparison.py",
        "(1.0 - config.registry.confidence) / max(1, len(shared))",
        "(1.0 - config.registry.confidence)",
        "tests/unit/registry/test_gate_of_slices.py -k more_slices",
    ),
    Mutant(
        "a kind that nobody has allowed is called",
        "kftrain/trust.py",
        "if kind not in built_in and kind not in self.kinds:",
        "if not kind:",
        "tests/unit/checkpoint/test_hostile_exports.py -k no_reader_has_allowed",
    ),
    Mutant(
        "an export is read from where nobody has allowed it",
        "kftrain/trust.py",
        "return _scheme(uri) in self.schemes or any(",
        "return bool(uri) or any(",
        "tests/unit/checkpoint/test_hostile_exports.py -k no_reader_has_allowed",
    ),
    Mutant(
        "the gate promotes with few groups",
        "kftrain/registry/gate.py",
        "max(settings.min_groups, evidence.improvement.num_needed)",
        "max(1, evidence.improvement.num_needed)",
        "tests/unit/registry/test_gate.py",
    ),
    Mutant(
        "the gate promotes with few groups where rare losses are likely not to be among them",
        "kftrain/registry/gate.py",
        "max(settings.min_groups, evidence.improvement.num_needed)",
        "settings.min_groups",
        "tests/unit/test_false_promotions.py -k good_side",
    ),
    Mutant(
        "the interval takes a long tail on the bad side for one on either side",
        "kftrain/statistics/significance.py",
        "_hall(quantile, side * skew, num_units)",
        "_hall(quantile, 0.0 * side * skew, num_units)",
        "tests/unit/test_false_promotions.py -k seldom tests/unit/statistics/test_significance.py",
    ),
    Mutant(
        "the goal of the metric before stays where another metric is named",
        "kftrain/config.py",
        'is_same = old.get("metric", new["metric"]) == new["metric"]',
        "is_same = True",
        "tests/unit/stages/test_goal_of_metric.py -k names_another",
    ),
    Mutant(
        "a goal that contradicts the metric is taken",
        "kftrain/tasks/user_metrics.py",
        'if goal not in ("", own) and not is_kept:',
        "if False:",
        "tests/unit/stages/test_goal_of_metric.py",
    ),
    Mutant(
        "the gate goes by the goal that a run of before has kept",
        "kftrain/stages/register.py",
        "        config = with_goal(config, is_kept=True)\n",
        "",
        "tests/unit/stages/test_goal_of_metric.py -k old_run",
    ),
    Mutant(
        "the gate takes a challenger for the first model where the champion cannot be compared",
        "kftrain/registry/gate.py",
        "    if evidence.obstacle:\n",
        "    if evidence.obstacle and evidence.champion is not None:\n",
        "tests/unit/registry/test_gate.py",
    ),
    Mutant(
        "every try against a champion has the whole level",
        "kftrain/statistics/significance.py",
        "return level / (number * (number + 1))",
        "return level / number**0",
        "tests/unit/statistics/test_significance.py",
    ),
    Mutant(
        "a step that runs again is another try",
        "kftrain/registry/tries.py",
        "if document.identity == identity)",
        "if document.identity != document.identity)",
        "tests/unit/registry/test_tries.py",
    ),
    Mutant(
        "the gate promotes what is worse on a slice",
        "kftrain/registry/gate.py",
        "if not change.high >= -limit}",
        "if not change.high >= -limit - 1e9}",
        "tests/unit/registry/test_gate.py",
    ),
    Mutant(
        "the k-th try has a k-th of the level: the shares add up to more than all of it",
        "kftrain/statistics/significance.py",
        "return level / (number * (number + 1))",
        "return level / number",
        "tests/unit/statistics/test_significance.py",
    ),
    Mutant(
        "McNemar's test is made at the level of a first try",
        "kftrain/registry/gate.py",
        "level = evidence.test, (1.0 - evidence.confidence) / 2.0",
        "level = evidence.test, (1.0 - _.confidence) / 2.0",
        "tests/unit/registry/test_gate.py",
    ),
    Mutant(
        "what a slice may lose is not looked at",
        "kftrain/registry/gate.py",
        "if not change.high >= -limit}",
        "if change.high < 0}",
        "tests/unit/registry/test_gate.py",
    ),
    Mutant(
        "slices that cannot be compared are none",
        "kftrain/registry/gate.py",
        "    if evidence.slices is None:\n",
        "    if False:\n",
        "tests/unit/registry/test_gate.py",
    ),
    Mutant(
        "a reference set on which the challenger is worse stops nothing",
        "kftrain/registry/gate.py",
        "if change.high < 0 and (margin is None or change.low < -margin):",
        "if False:",
        "tests/unit/registry/test_gate.py",
    ),
    Mutant(
        "the gate promotes what a person has declined",
        "kftrain/registry/promotion.py",
        "        if refusal is not None:\n",
        "        if False:\n",
        "tests/unit/registry/test_declined.py",
    ),
    Mutant(
        "a decline is no entry of the journal, so that the gate does not meet it",
        "kftrain/registry/promotion.py",
        '        return (earlier, None) if earlier else (refusal, entry.model_copy(update={"declined": refusal}))\n',
        "        return earlier or refusal, None\n",
        "tests/unit/registry/test_meanwhile.py",
    ),
    Mutant(
        "a register step that runs again undoes a rollback",
        "kftrain/registry/promotion.py",
        "        if back and not registered.identical:\n",
        "        if False:\n",
        "tests/unit/registry/test_meanwhile.py",
    ),
    Mutant(
        "the alias is not read again after an export was read",
        "kftrain/registry/champion_alias.py",
        'if self.observe()[2] != "external" and self._append(entry):',
        "if self._append(entry):",
        "tests/unit/registry/test_meanwhile.py",
    ),
    Mutant(
        "the files of what others have registered are read, wherever they lie",
        "kftrain/registry/lineage.py",
        "model_client.read_model_file(uri, model, FILE_NAME) if EXPORT_DIGEST_TAG in model.tags else None",
        "model_client.read_model_file(uri, model, FILE_NAME)",
        "tests/unit/registry/test_foreign_versions.py",
    ),
    Mutant(
        "a run of MLflow whose creation was answered into the void stays beside the one that was made again",
        "kftrain/tracking/client.py",
        "[run for run in twins[1:] if not run.data.params]",
        "[]",
        "tests/unit/registry/test_lost_answers.py",
    ),
    Mutant(
        "what a run has made is not looked for after MLflow refused to say it twice",
        "kftrain/tracking/model_client.py",
        "            if model_id not in _list_outputs(client, run_id):\n                raise\n",
        "            raise\n",
        "tests/unit/registry/test_lost_answers.py",
    ),
    Mutant(
        "MLflow shows as the champion's figure the one that it was registered with",
        "kftrain/registry/promotion.py",
        "theirs = judgement.read_measured_version(alias, alias.journal.entries(), rival, digest)",
        "theirs = own",
        "tests/unit/registry/test_shown_in_mlflow.py",
    ),
    Mutant(
        "runs are listed by their names",
        "kftrain/cli/jobs.py",
        "key=lambda run: (run.started, run.run_id)",
        "key=lambda run: run.run_id",
        "tests/unit/cli/test_runs_command.py",
    ),
    Mutant(
        "a run that was deleted is taken for a wrong address",
        "kftrain/kubeflow/client.py",
        "if deleted and error.status == NOT_FOUND:",
        "if False:",
        "tests/unit/cli/test_submit.py",
    ),
    Mutant(
        "a recurring run is deleted although a run of it lives",
        "kftrain/schedule/apply.py",
        "        if live:\n",
        "        if False:\n",
        "tests/unit/schedule/test_apply.py",
    ),
    Mutant(
        "who applies a schedule waits for nobody",
        "kftrain/schedule/turn.py",
        "if holder is None or holder.given_back or silence.seconds >= SILENT_SECONDS:",
        "if True:",
        "tests/unit/schedule",
    ),
    Mutant(
        "an old listing takes the turn of somebody else",
        "kftrain/schedule/turn.py",
        " or self._records.last_number() != number:\n",
        ":\n",
        "tests/unit/schedule/test_turn.py",
    ),
    Mutant(
        "a scheduled run gives no sign of life while it shards",
        "kftrain/stages/failure.py",
        "return Heartbeat(paths) if config.schedule.name else contextlib.nullcontext()",
        "return contextlib.nullcontext()",
        "tests/unit/stages/test_firing.py -k hour",
    ),
    Mutant(
        "an index of firings is trusted for ever",
        "kftrain/schedule/state.py",
        "if BACKFILL not in key and key not in known:",
        "if BACKFILL not in key and not known:",
        "tests/unit/schedule/test_history.py -k beside_an_index",
    ),
    Mutant(
        "each decision reads how all firings have ended",
        "kftrain/schedule/state.py",
        'storage.publish(storage.join(folder, f"{key}.{known[key]}"), "")',
        "pass",
        "tests/unit/schedule/test_history.py -k costs",
    ),
    Mutant(
        "what failed before the last training counts",
        "kftrain/schedule/state.py",
        'if known.get(key) == "trained":',
        "if False:",
        "tests/unit/schedule/test_history.py",
    ),
    Mutant(
        "a day of a sliding window has 24 hours",
        "kftrain/stages/windows.py",
        "start = cron.find_days_before("
        "cron.parse_cron(schedule.cron), cron.load_zone(schedule.time_zone), instant, days)",
        "start = instant - timedelta(days=days)",
        "tests/unit/stages/test_scheduled_windows.py -k days",
    ),
    Mutant(
        "a time that the clock leaves out is taken for the one that it shows",
        "kftrain/schedule/cron.py",
        "instant - timedelta(days=ago)) for ago in (0, 1)]",
        "instant - timedelta(days=ago)) for ago in (0,)]",
        "tests/unit/stages/test_scheduled_windows.py -k days",
    ),
    Mutant(
        "a window begins at the beginning, whatever was trained on",
        "kftrain/stages/windows.py",
        "    start = max([*ends, schedule.first])\n",
        "    start = schedule.first\n",
        "tests/unit/stages/test_scheduled_windows.py -k bounded",
    ),
    Mutant(
        "what came late is never read",
        "kftrain/sharding/sources/selection.py",
        "return self.whole.start <= moment < self.window.start and self.is_new(name)",
        "return False",
        "tests/unit/stages/test_firing.py -k last_training",
    ),
    Mutant(
        "a run that was overtaken moves the watermark, too",
        "kftrain/run/watermark.py",
        "return records.append(number, entry) or records.read(number).run_uri == run_uri",
        "return records.append(number, entry) or True",
        "tests/unit/stages/test_scheduled_windows.py -k moves",
    ),
    Mutant(
        "what was trained on before its run was lost is trained on again",
        "kftrain/stages/firing.py",
        "        if _is_registered(RunPaths(firing.run_uri)):\n",
        "        if False:\n",
        "tests/unit/stages/test_scheduled_windows.py -k written",
    ),
    Mutant(
        "an instant is run twice",
        "kftrain/stages/firing.py",
        "    if claimed.job_id != job_id:\n",
        "    if False:\n",
        "tests/unit/stages/test_firing.py -k once",
    ),
    Mutant(
        "a backfill makes the runs of the schedule skip",
        "kftrain/stages/firing.py",
        'if "backfill" not in (trigger, firing.trigger)]',
        "]",
        "tests/unit/stages/test_firing.py -k wait_for_each_other",
    ),
    Mutant(
        "a run that has nothing to do is at work until its last step has ended",
        "kftrain/stages/firing.py",
        "        end_firing(begun.config, paths, job_id, None, progress)\n",
        "        pass\n",
        "tests/unit/stages/test_firing.py -k not_at_work",
    ),
    Mutant(
        "a run that has nothing to do starts the pods of all steps",
        "kftrain/stages/firing.py",
        '        next_step="finish",\n',
        "",
        "tests/unit/stages/test_firing.py -k takes_its_instant",
    ),
    Mutant(
        "a run on a laptop ends after its first step",
        "kftrain/client/pipeline_process.py",
        """.replace(NEXT_STEP, "('train')")""",
        "",
        "tests/pipeline/test_runner.py -k whatever_the_first",
    ),
    Mutant(
        "a first step that runs again trains what it has left to the next run",
        "kftrain/stages/firing.py",
        "    if before is not None and history.read_end(key) is not None:",
        "    if False:",
        "tests/unit/stages/test_firing.py -k not_at_work",
    ),
    Mutant(
        "a schedule that is resumed runs what it has missed",
        "kftrain/stages/firing.py",
        "    if event is not None and instant.timestamp() < event.time:\n",
        "    if False:\n",
        "tests/unit/stages/test_fire.py -k resumed",
    ),
    Mutant(
        "a run by hand that did nothing has succeeded",
        "kftrain/client/managed_schedule.py",
        'if skipped is not None and skipped.why == "overlap":',
        "if False:",
        "tests/unit/cli/test_schedule.py -k nothing_to_do",
    ),
    Mutant(
        "a resume that is refused writes into the run",
        "kftrain/stages/shard.py",
        "prepared = _prepare(run, progress) if is_old and begun.skipped is None else None",
        "prepared = None",
        "tests/unit/stages/test_refusal.py",
    ),
    Mutant(
        "a failed save is not told",
        "kftrain/train/saves.py",
        'self._tell(f"warning: no checkpoint at step {step} ({count}): {error.line}")',
        "pass",
        "tests/unit/train/test_saves.py",
    ),
    Mutant(
        "training goes on whatever number of saves has failed",
        "kftrain/train/saves.py",
        "given_up = max_failed is not None and self._num_failed > max_failed",
        "given_up = False",
        "tests/unit/train/test_saves.py",
    ),
    Mutant(
        "hooks that come after the start are let be",
        "kftrain/train/spmd.py",
        "if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:",
        "if False:",
        "tests/distributed/test_parity_hooks.py -k 'cannot_be_heard and (forward or between)'",
    ),
    Mutant(
        "the comparison of a split model does not look at masks",
        "kftrain/train/probe_split.py",
        'if keywords["training"] and keywords["p"]:',
        "if False:",
        "tests/distributed/test_tensor_models.py -k mask",
    ),
    Mutant(
        "a split model is compared with weights that a gradient cannot pass",
        "kftrain/train/probe_split.py",
        "value = torch.randn(shape, generator=draw, device=device) * math.sqrt(shape[0] / shape.numel())",
        "value = torch.zeros(shape, device=device)",
        "tests/distributed/test_tensor_models.py -k changes_what_is_computed",
    ),
    Mutant(
        "gradients of a split model are compared with nothing",
        "kftrain/train/probe_split.py",
        '        self.take(name, "gradient", gradient)\n',
        "",
        "tests/distributed/test_tensor_models.py -k changes_what_is_computed",
    ),
    Mutant(
        "a probe leaves in the model what forward keeps",
        "kftrain/train/probe.py",
        "            attributes.clear()\n",
        "",
        "tests/unit/train/test_attributes.py -k same_objects",
    ),
    Mutant(
        "a state that no checkpoint has is trained with",
        "kftrain/train/probe.py",
        "        if find_first_difference(at_first, attributes) is not None:",
        "        if False:",
        "tests/unit/train/test_attributes.py -k no_checkpoint",
    ),
    Mutant(
        "buffers that differ by process are saved",
        "kftrain/train/spmd.py",
        "        buffers.require_equal(model, world)\n",
        "",
        "tests/unit/train/test_attributes.py -k begins_to_differ",
    ),
    Mutant(
        "calls that depend on chance are looked at once",
        "kftrain/train/probe.py",
        "num_chances if is_random else 1",
        "1",
        "tests/unit/train/test_probe.py -k depend_on_chance",
    ),
    Mutant(
        "ddp computes bf16 by autocast",
        "kftrain/parallel/replicas.py",
        "self._compute = compute",
        "self._compute = torch.float32",
        "tests/unit/train/test_probe.py -k bf16_is_one_computation",
    ),
    Mutant(
        "modules that are not called once by each process are sharded by themselves",
        "kftrain/parallel/blocks.py",
        "return next((names for names in candidates.lists if _are_called_once(names, seen)), [])",
        "return next(iter(candidates.lists), [])",
        "tests/unit/parallel/test_blocks.py",
    ),
    Mutant(
        "blocks that are called by another method than forward are sharded by themselves",
        "kftrain/parallel/blocks.py",
        "        _require_called(candidates.lists[0], seen)\n",
        "",
        "tests/unit/parallel/test_blocks.py",
    ),
    Mutant(
        "a GPU that torch does not see is replaced by the CPU",
        "kftrain/parallel/world.py",
        "if gpus_per_node and not seen:",
        "if gpus_per_node and seen < 0:",
        "tests/unit/parallel/test_join_world.py",
    ),
    Mutant(
        "the configuration takes numbers that are none",
        "kftrain/core/plain.py",
        "isinstance(value, float) and not math.isfinite(value)",
        "isinstance(value, float) and value is None",
        "tests/unit/core/test_config_fuzz.py -k attack",
    ),
    Mutant(
        "a stop that one process was asked for stays with it",
        "kftrain/train/loop.py",
        "NextStep(batch, int(terms), stop > 0,",
        "NextStep(batch, int(terms), self._stop.requested,",
        "tests/unit/train/test_loop.py",
    ),
    Mutant(
        "a read that was cut off is not read again",
        "kftrain/core/storage.py",
        '@retried("read")\ndef read_ranges',
        "def read_ranges",
        "tests/unit/data/test_loader_outages.py",
    ),
    Mutant(
        "an attempt that its successor has overtaken is not fenced",
        "kftrain/run/attempts.py",
        "if storage.exists(paths.attempt(attempt + 1)):",
        "if storage.exists(paths.attempt(attempt + 2)):",
        "tests/unit/run/test_attempts.py",
    ),
    Mutant(
        "who loses the race for a claim takes the run all the same",
        "kftrain/run/attempts.py",
        "        number += 1\n",
        "        return number\n",
        "tests/unit/run/test_attempts.py",
    ),
    Mutant(
        "a failure forgives a claim, as an outage does",
        "kftrain/run/budget.py",
        "if end.is_excused]",
        "]",
        "tests/unit/run/test_budget.py",
    ),
    Mutant(
        "one outage that takes two workers forgives two claims",
        "kftrain/run/budget.py",
        "max(self.excused.values(), default=0)",
        "sum(self.excused.values())",
        "tests/unit/run/test_budget.py",
    ),
    Mutant(
        "one more attempt is made than may fail",
        "kftrain/run/budget.py",
        "self.num_failed > self.limit",
        "self.num_failed > self.limit + 1",
        "tests/unit/run/test_budget.py",
    ),
    Mutant(
        "processes that compute the same loss terms count them twice",
        "kftrain/parallel/mesh.py",
        "values if self.counts_loss else [0.0] * len(values)",
        "values",
        "tests/unit/parallel/test_mesh.py",
    ),
    Mutant(
        "a group of the mesh is made anew whenever it is asked for",
        "kftrain/parallel/mesh.py",
        "if key not in self._groups:",
        "if True:",
        "tests/unit/parallel/test_mesh.py",
    ),
    Mutant(
        "kftrain init writes over what a folder holds",
        "kftrain/cli/init.py",
        "if root.exists() and any(root.iterdir()):",
        "if False:",
        "tests/unit/cli/test_init.py -k 'stays_as_it_is'",
    ),
    Mutant(
        "from Python, a kind that the caller trusts is not trusted",
        "kftrain/api.py",
        "listed.kinds | set(trusted_kinds)",
        "listed.kinds",
        "tests/unit/core/test_python_api.py -k own_root",
    ),
    Mutant(
        "from Python, a run that is resumed loses its own configuration",
        "kftrain/api.py",
        "folder, resume, keep=config is None)",
        "folder, resume, keep=False)",
        "tests/unit/core/test_python_api.py -k starts_where",
    ),
    Mutant(
        "the targets of the example are not normalised",
        "examples/own_task/diabetes/task.py",
        "target_std=target_std)",
        "target_std=1.0)",
        "tests/unit/tasks/test_own_task_example.py -k example_is_scaled",
    ),
    Mutant(
        "random numbers of a sample follow those of the one before",
        "kftrain/data/decoding.py",
        "        self._philox.state = self._start\n",
        "",
        "tests/unit/data/test_workers.py -k threads_give",
    ),
    Mutant(
        "a sample that cannot be decoded counts",
        "kftrain/data/loader.py",
        "weights.reshape(-1)[list(fetched.filled.bad)] = 0",
        "pass",
        "tests/unit/data/test_workers.py -k tolerated",
    ),
    Mutant(
        "shared memory is written to while somebody has its batch",
        "kftrain/data/shared_rows.py",
        "weakref.finalize(lease, self._free.append, slot).atexit = False",
        "self._free.append(slot)",
        "tests/unit/data/test_workers.py -k are_kept",
    ),
    Mutant(
        "a GPU computes with a batch that is still being copied",
        "kftrain/train/step.py",
        "            self.streams.wait(self.event)\n",
        "",
        "tests/unit/train/test_carrier.py",
    ),
    Mutant(
        "each file is a part",
        "kftrain/sharding/sources/pieces.py",
        "return hash_name(name) * target_bytes < size << 64",
        "return True",
        "tests/unit/sharding/sources/test_source_parts.py -k about_the_size",
    ),
    Mutant(
        "a part that is there is written again",
        "kftrain/sharding/parts/store.py",
        "document = self.find(input_digest, part.state)",
        "document = None",
        "tests/unit/sharding/parts/test_appended.py -k only_the_part",
    ),
    Mutant(
        "copies in both splits are not looked for",
        "kftrain/sharding/parts/findings.py",
        "*_find_common(self._contents, *known)",
        "*_find_common(self._contents, known[0], known[1][:0])",
        "tests/unit/sharding/parts/test_findings.py -k comparison_of_all",
    ),
    Mutant(
        "the split goes by the number of an equal record, too",
        "kftrain/sharding/sources/keyed.py",
        "unit=unit or digest",
        "unit=unit or name + number",
        "tests/unit/sharding/test_record_keys.py -k equal_records",
    ),
    Mutant(
        "a stratum keeps the fraction instead of the threshold that it has learned",
        "kftrain/sharding/sources/keyed.py",
        "= min(max(int(fraction * HASH_VALUES), lowest), int(ordered[num_held_out]))",
        "= int(fraction * HASH_VALUES)",
        "tests/unit/sharding/test_record_keys.py -k scikit",
    ),
    Mutant(
        "strata learn their thresholds anew under another size of shards",
        "kftrain/sharding/shard_dataset.py",
        "**known, **content})",
        "**known, **content, 'size': data.shard_size_bytes})",
        "tests/unit/sharding/test_record_keys.py -k keep_their_thresholds",
    ),
    Mutant(
        "thresholds of strata that hold nothing are learned anew",
        "kftrain/sharding/shard_dataset.py",
        "                if strata:  #",
        "                if True:  #",
        "tests/unit/sharding/test_record_keys.py -k damaged_thresholds",
    ),
    Mutant(
        "a dataset of before is known by content from now on",
        "kftrain/sharding/shard_dataset.py",
        "if not storage.exists(self.latest_uri()):",
        "if True:",
        "tests/unit/sharding/test_record_keys.py -k of_before",
    ),
    Mutant(
        "files that were replaced at the same size and time are not read",
        "kftrain/sharding/parts/store.py",
        '(target["state"] != state if "state" in target else self.level == "replaced")',
        "False",
        "tests/unit/sharding/sources/test_what_is_listed.py -k same_size",
    ),
    Mutant(
        "what Spark has not finished is data",
        "kftrain/sharding/sources/listing.py",
        'return name.startswith("_") or "/_" in name',
        "return False",
        "tests/unit/sharding/sources/test_what_is_listed.py -k spark",
    ),
    Mutant(
        "a part is kept without looking whether its source has changed",
        "kftrain/sharding/shard_dataset.py",
        "        if written:\n            self._refuse_changed_source()\n",
        "",
        "tests/unit/sharding/parts/test_appended.py -k while_it_is_read",
    ),
    Mutant(
        "Muon's iteration is of each process's rows alone",
        "kftrain/parallel/sharded.py",
        "            by_rows.setdefault((tensor.device_mesh, axes[0]), []).append(place)",
        "            done[place] = work(parts[place])",
        "tests/distributed/test_parity.py -k muon",
    ),
    Mutant(
        "the sums of Adafactor are of each process's part alone",
        "kftrain/parallel/sharded.py",
        "            dist.all_reduce(flat, group=mesh.get_group(axis))",
        "            pass",
        "tests/distributed/test_parity.py -k adafactor",
    ),
    Mutant(
        "SGD takes a step that is not finite",
        "kftrain/train/optimizer_kinds.py",
        "found_inf=None if self.found_inf is None else self.found_inf.to(gradients[0].device),",
        "found_inf=None,",
        "tests/unit/train/test_spmd.py -k changes_no_tensor",
    ),
    Mutant(
        "Muon's momentum takes a step that is not finite",
        "kftrain/train/optimizer_kinds.py",
        "gradient.copy_(torch.where(counts > 0, gradient, buffer))",
        "gradient.copy_(gradient)",
        "tests/unit/train/test_spmd.py -k changes_no_tensor",
    ),
    Mutant(
        "Adafactor counts a step that is skipped",
        "kftrain/train/optimizer_kinds.py",
        'part.state["step"].add_(counts)',
        'part.state["step"].add_(1)',
        "tests/unit/train/test_spmd.py -k changes_no_tensor",
    ),
    Mutant(
        "the multiple of a group's learning rate is forgotten",
        "kftrain/train/optimizer.py",
        'group["lr"] = rate * scale',
        'group["lr"] = rate',
        "tests/unit/train/test_optimizer_members.py",
    ),
    Mutant(
        "of several groups the last one counts",
        "kftrain/train/optimizer.py",
        "    return next(fitting, OTHERS)",
        "    return [OTHERS, *fitting][-1]",
        "tests/unit/train/test_optimizer_members.py",
    ),
    Mutant(
        "retention deletes the best checkpoint",
        "kftrain/run/commit.py",
        "if name.step == best_step or",
        "if name.step == -1 or",
        "tests/unit/train/test_best_checkpoint.py",
    ),
    Mutant(
        "the last checkpoint is exported although another one is the best",
        "kftrain/train/completing.py",
        "order_steps(finished.selection, _read_metric_by_step(finished), ",
        "order_steps(None, {}, ",
        "tests/unit/train/test_best_checkpoint.py",
    ),
    Mutant(
        "a restart forgets the best evaluation",
        "kftrain/train/loop.py",
        "        self.best.resume(loaded.manifest.selection)\n",
        "",
        "tests/unit/train/test_best_checkpoint.py",
    ),
    Mutant(
        "a best checkpoint is not saved while another one is written",
        "kftrain/train/loop.py",
        "is_saving and not improved",
        "is_saving",
        "tests/unit/train/test_loop.py",
    ),
    Mutant(
        "a best checkpoint that was not written stays the best",
        "kftrain/train/saves.py",
        "            self._forget(step)\n",
        "",
        "tests/unit/train/test_loop.py",
    ),
    Mutant(
        "the first evaluation is one without improvement",
        "kftrain/run/selection.py",
        "num_without_improvement: int = 0",
        "num_without_improvement: int = 1",
        "tests/unit/run/test_selection.py",
    ),
    Mutant(
        "all bins weigh the same in the calibration error",
        "kftrain/evaluate/curves.py",
        "error = float((num_samples * np.abs(accuracy - confidence)).sum() / max(total, 1))",
        "error = float(np.abs(accuracy - confidence)[filled].sum() / max(filled.sum(), 1))",
        "tests/unit/evaluate/test_curves.py -k calibration",
    ),
    Mutant(
        "a bin of the calibration is named by the edges of the one before",
        "kftrain/evaluate/curves.py",
        "edges = np.linspace(0.0, 1.0, table.shape[1] + 1)",
        "edges = np.linspace(0.0, 1.0, table.shape[1] + 1) - 1 / table.shape[1]",
        "tests/unit/evaluate/test_curves.py -k calibration",
    ),
    Mutant(
        "the precision of a class is its recall",
        "kftrain/evaluate/curves.py",
        "precision=_ratio(right[number], given[number])",
        "precision=_ratio(right[number], there[number])",
        "tests/unit/evaluate/test_curves.py -k by_class",
    ),
    Mutant(
        "what goes while its folder is listed is an error",
        "kftrain/core/storage.py",
        "        with contextlib.suppress(FileNotFoundError, NotADirectoryError):\n            yield path",
        "        if True:\n            yield path",
        "tests/unit/core/test_vanishing_entries.py",
    ),
    Mutant(
        "a shard step moves away what another one has just published",
        "kftrain/data/shards/staging.py",
        "        if not is_good():\n            _replace(",
        "        if True:\n            _replace(",
        "tests/unit/core/test_vanishing_entries.py",
    ),
    Mutant(
        "a process takes whoever is its parent by now for the one that started it",
        "kftrain/process/parent_death.py",
        "    if os.getppid() != parent:",
        "    if os.getppid() == 0:",
        "tests/unit/process/test_lifetime.py -k before_the_child",
    ),
    Mutant(
        "an apply does not hear that the schedule goes on meanwhile",
        "kftrain/schedule/apply.py",
        "            listed, now = self._list_recurring(), wanted()\n",
        '            listed, now = self._list_recurring(), self.__dict__.setdefault("_first", wanted())\n',
        "tests/unit/schedule/test_apply.py -k resume_and_pause",
    ),
    Mutant(
        "a shard that does not fit empties the cache",
        "kftrain/data/shards/cache.py",
        "            if too_many > 0:\n                return False\n",
        "",
        "tests/unit/data/shards/test_node_cache.py -k does_not_fit",
    ),
    Mutant(
        "what lies below all that was there before is no change",
        "kftrain/sharding/drift.py",
        "np.unique([np.nextafter(lowest, -np.inf),",
        "np.unique([-np.inf,",
        "tests/unit/sharding/test_drift_measures.py -k outside",
    ),
    Mutant(
        "numbers that are missing are no change",
        "kftrain/sharding/profile.py",
        "missing=sum(num_missing) / num_values,",
        "missing=0.0,",
        "tests/unit/stages/test_drift_of_runs.py -k no_number",
    ),
    Mutant(
        "what a sample shows has the order of its document",
        "kftrain/report/content.py",
        "for name in (*names, *texts) if name in texts}",
        "for name in texts}",
        "tests/unit/report/test_data_report.py -k order_of_the_task",
    ),
    Mutant(
        "a curve is named with where it ends",
        "kftrain/report/evaluation.py",
        ", figure=wording.format_number(curve.area))",
        ")",
        "tests/unit/report/test_report_classes.py -k area_below",
    ),
    Mutant(
        "lamb measures its own part of a parameter alone",
        "kftrain/train/optimizer_kinds.py",
        "sum_over_parts(squares, parameters)",
        "squares",
        "tests/distributed/test_parity.py -k 'lamb and tensor'",
    ),
    Mutant(
        "a variable of ours may be set for workers",
        "kftrain/launch/settings.py",
        "_OUR_VARIABLES.fullmatch(name) or ",
        "",
        "tests/unit/launch/kubernetes/test_pytorchjob.py -k variable_of_ours",
    ),
    Mutant(
        "what serves a version has a token of the cluster",
        "kftrain/registry/inference_service.py",
        '"automountServiceAccountToken": False,',
        '"automountServiceAccountToken": True,',
        "tests/unit/registry/test_inference_service.py -k no_token",
    ),
    Mutant(
        "a link in the place of our temporary folder is followed",
        "kftrain/process/presence.py",
        "status = folder.lstat()",
        "status = folder.stat()",
        "tests/unit/launch/test_local.py -k a_link_to_another_folder",
    ),
    Mutant(
        "credentials in lists of the configuration are kept",
        "kftrain/core/credentials.py",
        "    elif isinstance(document, list):",
        "    elif isinstance(document, tuple):",
        "tests/unit/cli/test_canary.py -k would_keep_credentials",
    ),
    Mutant(
        "reports show signatures of URIs",
        "kftrain/report/wording.py",
        "_FORBIDDEN.sub(REPLACEMENT, redact(str(value)))",
        "_FORBIDDEN.sub(REPLACEMENT, str(value))",
        "tests/unit/report/test_wording.py -k no_more_of_a_secret",
    ),
    Mutant(
        "the best evaluation before is forgotten",
        "kftrain/train/best.py",
        "            self._before = self.selection\n",
        "            self._before = None\n",
        "tests/unit/train/test_best_selection.py",
    ),
    Mutant(
        "a resumed run forgets which samples were left out",
        "kftrain/train/loop.py",
        "        self._left_out.resume(loaded.manifest.bad_samples)\n",
        "",
        "tests/unit/train/test_loop.py -k left_out",
    ),
    Mutant(
        "a checkpoint forgets which samples were left out",
        "kftrain/checkpoint/save.py",
        "            bad_samples=tuple(sorted(self.bad_samples)),\n",
        "",
        "tests/unit/checkpoint/test_save.py",
    ),
    Mutant(
        "buckets of gradients do not travel in the format of the exchange",
        "kftrain/parallel/replicas.py",
        "    small = buffer.to(dtype)\n",
        "    small = buffer\n",
        "tests/unit/parallel/test_summed_buckets.py",
    ),
    Mutant(
        "pages may load anything",
        "kftrain/report/templates/page.html",
        "default-src 'none'",
        "default-src *",
        "tests/unit/report/test_report_pages.py -k load_nothing",
    ),
    Mutant(
        "the last of two equal keys counts",
        "kftrain/core/plain.py",
        "        if len(mapping) < len(node.value):\n",
        "        if len(mapping) > len(node.value):\n",
        "tests/unit/core/test_config.py -k refused_with_key",
    ),
    Mutant(
        "true is a number",
        "kftrain/settings/section.py",
        "if isinstance(value, bool) and re",
        "if value is info and re",
        "tests/unit/core/test_config.py -k refused_with_key",
    ),
    Mutant(
        "integers are octal where they begin with 0",
        "kftrain/core/plain.py",
        "0x[0-9a-fA-F_]+|0|",
        "0x[0-9a-fA-F_]+|0[0-7_]*|",
        "tests/unit/core/test_config.py -k begins_with_0",
    ),
    Mutant(
        "a checkpoint that stays is left out while another one is written",
        "kftrain/train/loop.py",
        "and not improved and not stays",
        "and not improved",
        "tests/unit/train/test_loop.py -k that_stays",
    ),
    Mutant(
        "moments may lie at the end of the calendar",
        "kftrain/schedule/settings.py",
        "and 1970 <= moment.year < 9000",
        "",
        "tests/unit/cli/test_schedule.py -k end_of_the_calendar",
    ),
]


def is_green(root: Path, tests: str) -> bool:
    """Whether all of some tests pass in a copy of the repository. Raises SystemExit where none of them runs."""
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)]
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode not in (0, 1):  # no tests, or they could not be collected: that proves nothing
        sys.exit(f"{tests}: pytest ended with {ended.returncode}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.returncode == 0


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy of the repository."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder)
        for name in COPIED:
            source, ignored = REPOSITORY / name, shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, root / name, ignore=ignored) if source.is_dir() else shutil.copy(source, root)
        yield root


def describe_stale(mutants: Iterable[Mutant]) -> str:
    """A line for each mutant with nothing to break, or more than one place; empty where there is none."""
    counted = ((mutant, (REPOSITORY / mutant.path).read_text().count(mutant.before)) for mutant in mutants)
    return "\n".join(f"{each.name}: {each.path} holds the text {count} times" for each, count in counted if count != 1)


def survives(mutant: Mutant) -> bool:
    """Whether all tests pass although the product is broken."""
    with copied() as root:
        target = root / mutant.path
        target.write_text(target.read_text().replace(mutant.before, mutant.after))
        return is_green(root, mutant.tests)


def require_green(tests: str) -> None:
    """Raises SystemExit for tests that are red already: those would kill every mutant."""
    with copied() as root:
        if not is_green(root, tests):
            sys.exit(f"{tests}: red although nothing is broken")


def main(names: list[str]) -> int:
    """Tries the mutants of these names, or all; returns 1 where one survives."""
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    assert chosen, f"no such mutant: {names}"
    if stale := describe_stale(chosen):
        sys.exit(stale)
    alive = []

    def attempt(mutant: Mutant) -> None:
        start = time.monotonic()
        survived = survives(mutant)
        print(f"{'SURVIVED' if survived else 'killed  '} {time.monotonic() - start:5.0f} s  {mutant.name}", flush=True)
        if survived:
            alive.append(mutant)

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        list(pool.map(require_green, dict.fromkeys(mutant.tests for mutant in chosen)))
        list(pool.map(attempt, chosen))
    print(f"{len(chosen) - len(alive)} killed, {len(alive)} survived")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
