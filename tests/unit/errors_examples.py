"""One example of every error a user can meet, as it would be raised."""

from pathlib import Path

from unbroken import errors
from unbroken.errors import Help, Problem, UnbrokenError

RUN = Path("runs/a")
STORE = RUN / "checkpoints"
CHECKPOINT = STORE / "checkpoint-1000"

EXAMPLES: tuple[UnbrokenError, ...] = (
    errors.LeftMidStep(run=RUN, step=9, resumable_step=5),
    errors.LoopsDisagree(run=RUN, step=8),
    errors.SlurmMissing(command="sbatch"),
    errors.SlurmRefused(
        command=("sbatch", "--parsable", "/home/a/run.sbatch"),
        code=1,
        words="sbatch: error: invalid partition specified: gpus",
        before=("4711", "4712"),
    ),
    errors.LanesUnfit(global_batch=64, lane=8, world=9, complaint="8 lanes a step leave 1 of 9 ranks without any"),
    errors.StreamDiffers(differences=(("seed", "1", "2"), ("max_length", "2048", "4096"))),
    errors.SequenceDamaged(root=Path("data"), sample=12_345, shards=("web/00012-000", "web/00012-003")),
    errors.BadDocuments(
        problems=("web/a.jsonl:17: it is no JSON: expecting value at character 1",),
        is_more=False,
        command="unbroken tokenize --input-dir text --output-dir data/train --tokenizer-path bytes",
    ),
    errors.ControlToken(place="web/a.jsonl:17", token=0, tokenizer="gpt2"),
    errors.NoEodToken(tokenizer="own", asked=None, tried=("<|endoftext|>", "</s>")),
    errors.NoTokens(path=Path("text"), left_out=(("empty", 3), ("short", 1))),
    errors.NoTextFound(path=Path("text"), known=(".jsonl", ".txt"), unknown=("a.csv",)),
    errors.PackageMissing(package="pyarrow", purpose="reading .parquet"),
    errors.ShardsExist(output=Path("data/train"), found="00000-000.bin"),
    errors.SourceBroken(path=Path("text/a.jsonl.gz"), reason="it ends in the middle of its compressed bytes"),
    errors.ColumnMissing(path=Path("text/a.parquet"), column="text", columns=(("id", "int64"), ("body", "string"))),
    errors.GptSimpleRun(run=Path("outputs"), checkpoints=("checkpoint-500", "checkpoint-612-shutdown")),
    errors.SourcesChanged(output=Path("data/train"), changed=("a.jsonl",), gone=("b.jsonl",), added=("c.jsonl",)),
    errors.SourcesChanged(output=Path("data/train"), added=("c.jsonl",)),
    errors.TokenizeBusy(output=Path("data/train")),
    errors.TokenizedDifferently(output=Path("data/train"), differences=(("min_text_length", "0", "200"),)),
    errors.TokenizerUnknown(asked="gtp2", reason="there is no such path, and the hub did not give it"),
    errors.WorkerDied(
        how="was killed by SIGKILL",
        unit="web/a.jsonl",
        command="unbroken tokenize --input-dir text --output-dir data/train --tokenizer-path bytes",
    ),
    errors.DataChanged(
        path=Path("data"),
        changed=(errors.ShardChange("web", "00001-000", "has other tokens under the same index", "some"),),
        missing=(errors.ShardChange("web", "00002-000", "is gone", "all"),),
    ),
    errors.DataChanged(
        path=Path("data"), added=(errors.ShardChange("web", "00003-000", "is new, 120 documents in 9,000 tokens"),)
    ),
    errors.DataDamaged(path=Path("data/train"), findings=("web/00001-000.bin: it has 6 bytes; its index says 8",)),
    errors.DataMissing(path=Path("data"), lacks="it has no folder train/"),
    errors.ShardDamaged(path=Path("data/train/web/00001-000.idx"), complaint="it is of version 2; version 1 is read"),
    errors.TokenizationUnfinished(
        path=Path("data/train"), command="unbroken tokenize --input-dir text --output-dir data"
    ),
    errors.TokenizersDiffer(path=Path("data/train"), found=(("web", "gpt2, 50,257 ids"), ("code", "bytes, 257 ids"))),
    errors.TooManyRanks(ranks=9, lanes=8),
    errors.LaneBroken(complaint="lane 3 ended without lane.backward(loss)"),
    errors.CannotFold(name="head.weight", reason="it is kept in bfloat16"),
    errors.ArithmeticDiffers(differences=(("gpu", "NVIDIA A100", "NVIDIA H200"), ("torch", "2.11.0", "2.13.0"))),
    errors.ReplayUnfinished(
        run=RUN,
        checkpoint="checkpoint-2000",
        step=2000,
        reason="its job is halted at step 1,000: arithmetic-differs: torch is 2.13.0, was 2.11.0",
        log=Path("/tmp/unbroken-replay-4f/replay.log"),
        said=("unbroken train: halted (exit code 6)",),
        exit_code=6,
    ),
    errors.UnsavedState(found=("scheduler StepLR, called `schedule`",)),
    errors.StateDiffers(checkpoint=str(CHECKPOINT), missing=("model.head.bias",), unexpected=("model.tail.bias",)),
    errors.RankFailed(rank=3, cause=errors.DamagedCheckpoint(path=CHECKPOINT, findings=("state/0.distcp: short",))),
    errors.NotShared(path=RUN, rank=3, host="node-7"),
    errors.NotRestored(checkpoint=str(CHECKPOINT), names=("model.head.weight",)),
    errors.WrittenDuringSave(step=2000, names=("model.head.weight",)),
    errors.NotExact(differences=(("optimizer", "is not in the checkpoint and would start fresh"),)),
    errors.NotAnItem(name="schedule", type_name="function", lacks="state_dict and load_state_dict"),
    errors.NonFiniteLoss(step=1_234, metric="loss", value="nan", resumable_step=1_000),
    errors.NoProcessGroup(world_size=8),
    errors.NotInGroup(rank=3),
    errors.NeedsPickle(item="sampler", path="sampler.state.order", type_name="Order"),
    errors.DataEnded(epoch=2, served=40, found=31),
    errors.CheckpointsExist(store=STORE, count=3, newest="checkpoint-2000"),
    errors.BadDeadline(source="SLURM_JOB_END_TIME", value="1700000000", complaint="it was over 12 s ago"),
    errors.BadMix(problems=("phase 1 names the bucket 'wiki', which is not there",), buckets=("code", "web")),
    errors.DataUnfit(path=Path("data"), problems=("bucket web runs dry at step 812 of 1,000",)),
    errors.BadUsage(command="unbroken explain", complaint="there is no option '--ful'; did you mean --full?"),
    errors.Bug(cause="KeyError: 'step'"),
    errors.CannotSeal(path=CHECKPOINT, reason="it is empty", remedy=Help("unbroken explain cannot-seal", "why")),
    errors.CheckpointUnknown(reference="1500", store=STORE, known=("checkpoint-1000", "checkpoint-2000")),
    errors.CheckpointUnknown(
        reference="500", store=STORE, unsealed="checkpoint-500", sealing="unbroken seal out/checkpoint-500"
    ),
    errors.ConfigDiffers(
        run=RUN,
        changes=(
            errors.FieldChange("model.n_embd", "768", "1024", is_fixed=True),
            errors.FieldChange("optimizer.learning_rate", "3e-4", "1e-4", is_fixed=False),
        ),
    ),
    errors.ConfigMissing(run=RUN),
    errors.RunRecordDamaged(path=RUN / "config.json", complaint="it is no JSON document"),
    errors.ConfigInvalid(problems=(Problem("run.yaml", 7, "optimizer.lerning_rate", "unknown field", None),)),
    errors.ConfigUnreadable(path=Path("run.yaml"), complaint="the bracket is never closed", line=12),
    errors.DamagedCheckpoint(path=CHECKPOINT, findings=("state/0.distcp: bytes 4,096 to 8,191 differ",)),
    errors.EvidenceMissing(path=STORE / ".tmp-1", missing=("state/1.distcp: 0 of 512 bytes",)),
    errors.FormatUnknown(path=CHECKPOINT, found="unbroken.manifest/9", known=("unbroken.manifest/1",)),
    errors.Halted(reason="bucket web ran dry", step=1200, run=RUN),
    errors.LeaseLost(path=RUN, mine=4, current=5),
    errors.ManifestDamaged(path=CHECKPOINT / "manifest.json", complaint="it is no JSON"),
    errors.ModuleMissing(module="training.run", folder=Path("project")),
    errors.ItemsDiffer(names=(("model", "sampler"), ("model",), ("model",))),
    errors.NoMemory(needed_bytes=15_600_000_000, cause="DefaultCPUAllocator: can't allocate memory"),
    errors.PeerLost(rank=0, said="Connection closed by peer [10.0.0.7]:41532"),
    errors.PeerLost(rank=0, said="Connection closed by peer [10.0.0.7]:41532", lost=3),
    errors.RankRaised(
        rank=3,
        cause="ValueError: the label is 1001 of 1000",
        status="error",
        verdict="look",
        noticed_by=0,
        said="Connection closed by peer [10.0.0.7]:41532",
    ),
    errors.NoRoom(
        path=STORE,
        needed_bytes=15_600_000_000,
        reserve_bytes=64 << 20,
        free_bytes=6_100_000_000,
        needed_inodes=12,
        reserve_inodes=16,
        free_inodes=900_000,
        prunable_bytes=31_200_000_000,
        prunable=("checkpoint-100", "checkpoint-200"),
    ),
    errors.NoUsableCheckpoint(store=STORE, passed_over=(("checkpoint-1000", "never committed"),)),
    errors.NoOutcome(path=RUN),
    errors.NotAStore(path=Path("out/checkpoint-500"), sealing="unbroken seal out/checkpoint-500"),
    errors.NotAStore(path=Path("out/model.pt"), is_directory=False),
    errors.PathMissing(path=Path("runs/b"), purpose="run"),
    errors.RecordDamaged(path=STORE / ".rewinds" / "000001.json", complaint="it is no JSON"),
    errors.RunHeld(path=RUN, holder="job 4 on node-7", proof="renewed", watched_s=9.0),
    errors.RunHeld(path=RUN, holder="job 4 on node-7", proof="unknown"),
    errors.BadRunPath(path="", problem="empty"),
    errors.BadRunPath(path="runs/a", problem="dangling", obstacle="/scratch/a"),
    errors.BadRunPath(path="/home/other/runs/a", problem="forbidden", obstacle="/home/other"),
    errors.RunGone(path=RUN, job=4),
    errors.RunGone(path=RUN, job=4, is_there=True),
    errors.RunsElsewhere(path=RUN, holder="job 4 on node-7, process 71", reason="it runs on node-7"),
    errors.SealedDiffers(path=CHECKPOINT, findings=("model.pt: 512 bytes, the seal says 640",)),
    errors.StillRunning(path=RUN, holder="job 4 on node-7, process 71", waited_s=60.0),
    errors.StorageFailed(operation="write", path=CHECKPOINT / "manifest.json", cause="No space left on device"),
    errors.StorageFailed(operation="write", path=CHECKPOINT / "manifest.json", cause="Permission denied"),
    errors.TensorUnsupported(name="model.codes", reason="its layout is sparse"),
    errors.TorchMissing(purpose="starting several processes"),
    errors.BadSpot(source="UNBROKEN_SPOT", value="asw", complaint="it is none of aws, gcp, azure, auto, off"),
    errors.ManifestUnfit(problems=("--image is missing", "--memory '64 GB' is no quantity such as 64Gi")),
    errors.TornCheckpoint(path=CHECKPOINT, parts=3, size_bytes=6_100_000_000),
    errors.UnknownCommand(name="explian", nearest=("explain",)),
    errors.UnknownTopic(topic="torn-checkpont", nearest=("torn-checkpoint",)),
    errors.UnsafeName(name="../secret", reason="it leads out of the checkpoint", path=CHECKPOINT),
    errors.SequenceTooLong(tokens=4_096, positions=2_048),
    errors.GenerationInvalid(
        problems=("top_k must be at least 1, is 0", "top_p must be above 0 and at most 1, is 2.0")
    ),
    errors.LogitsNotFinite(tokens=12),
    errors.NotExpressible(target="a Llama of transformers", options=("model.norm layernorm",)),
    errors.WrongTokenizer(
        tokenizer="own.json", run=RUN, complaint="the run was trained with gpt2, 50,257 ids, of other contents"
    ),
    errors.DeviceMissing(asked="cuda:3", there=("cpu", "cuda:0")),
    errors.CompilerMissing(compiler="g++"),
    errors.CompilerMissing(compiler="gcc", device="cuda"),
    errors.NoAverage(checkpoint=CHECKPOINT),
    errors.GradientNotFinite(step=40, loss=2.5, scale=2.0**-9, overflowed=16),
    errors.AcceptUnknown(names=(("optimizer.learning_rat", ("optimizer.learning_rate",)), ("luck", ()))),
    errors.DeviceFull(device="cuda:0", doing="the weights"),
    errors.BatchInvalid(
        path=Path("prompts.jsonl"),
        problems=(
            "prompts.jsonl:3  generation.gredy: there is no such key; did you mean generation.greedy?",
            "prompts.jsonl:9  prompt: it is missing",
        ),
    ),
    errors.SourcesMissing(folder=Path("/usr/lib/python3.12")),
    errors.DemoFailed(
        what="job 3",
        was_to="die while it saves",
        ended="it ended with exit code 1",
        log=Path("demo/logs/job-3.log"),
        said=("torch.OutOfMemoryError: no memory",),
    ),
    errors.DrillUnreadable(path=Path("/tmp/drill.json"), reason="the drill lacks 'faults'"),
    errors.NothingToProve(
        command="python train.py",
        reason="the command never entered an unbroken.Run",
        remedy="put the training loop into `with unbroken.Run(...)`; see docs/run.md",
        log=("training", "done"),
    ),
    errors.BaselineFails(command="python train.py", how="exit code 1", log=("ValueError: no data",)),
    errors.NotDeterministic(
        command="python train.py",
        differences=("step 1 is the first that differs: loss is 0x1p-1 in the first run, 0x1p-2 in the second",),
        causes=("no seed: call torch.manual_seed(...) before the model is made",),
    ),
    errors.BadPlan(problems=("--steps is missing: how many steps are left was never measured",)),
    errors.MirrorDiffers(path=Path("/shared/a-1a2b3c4d/rank-00000"), findings=("state/__0_0.distcp: bytes 0 to 9",)),
    errors.NeedsPeers(item="model", type_name="FullyShardedDataParallel of the older kind"),
    errors.NoEmergencyArea(),
    errors.WouldOverwrite(path=Path("run.yaml"), remedy=Help("unbroken init --preset tiny", "print it instead")),
)


def leaves() -> list[type[UnbrokenError]]:
    """Every error class that has no subclass: those that are raised."""

    def below(cls: type[UnbrokenError]) -> list[type[UnbrokenError]]:
        children = cls.__subclasses__()
        return [leaf for child in children for leaf in below(child)] if children else [cls]

    return below(UnbrokenError)
