"""Whatever the user of train.py gets wrong: one line, exit status 2, no traceback, nothing written, nothing lost."""

import pytest

from tests.small_runs import TINY, again

BERT = "of type 'bert' is trained with --model.encoder.positions learned; begin a run with these flags"


@pytest.mark.parametrize(
    "arguments, message",
    {
        "nothing": "there is no experiment 'nothing'; expected one of python-docs, dates",
        "text": "no text was named; give --data.path",
        "pairs": "no pairs were named; give --data.path",
        # tests/test_sources.py has more of what a file may hold.
        f"text --data.path file --run run {TINY}": "the training part of the text has 7 tokens; expected at least 9",
        "pairs --data.path others/pairs.tsv --run run": "others/pairs.tsv, line 1: 1 column; expected 2",
        f"text --data.path {'x' * 300}": "x",
        "text --data.path ~nobody-of-this-name/text": "~nobody",
        f"dates --run {'x' * 300}": "x",
        "dates --run ~nobody-of-this-name/run": "~nobody",
        "dates --run file": "is a file",
        "dates --run others": "no config.json",
        "dates --run others --resume no": "no config.json",
        "dates --model.depth 3": "--model.depth",
        "dates --training.stps 5": "unrecognized options: --training.stps",
        "dates --training.stps 6": "perhaps you meant --training.steps",
        "dates --stpes 5": "perhaps you meant --steps;",
        "dates --lrr=3": "perhaps you meant --lr;",
        "dates --batchsize 5": "perhaps you meant --batch-size;",
        "--training.steps many": "--training.steps: 'many' is not a whole number; see train.py python-docs --help",
        "dates --steps 1.5": "--training.steps: '1.5' is not a whole number; see train.py dates --help",
        "dates --steps 1e999999999": "'1e999999999' is not a whole number",
        "dates --steps=": "'' is not a whole number",
        "dates --mesh.data 1.5": "--mesh.data is '1.5'; expected None or INT",
        "--training.steps": "--training.steps",
        "--training.steps 0": "steps is 0",
        "--training.batch-size -4": "batch_size is -4",
        "--training.batch-size 1e9": "batches of 1,000,000,000 rows take ",
        "dates --batch-size 1e12": "make the batch (--training.batch-size), ",
        "--sample.max-new-tokens 1e12": "max_new_tokens is 1000000000000; expected fewer than 2^31",
        "--data.tokenizer.vocab-size 1e9": "vocab_size is 1000000000; expected at most 2^24",
        "--model.decoder.activation gelu": "expected one of gelu_erf, gelu_tanh, relu, relu_squared, silu",
        "masked-docs --data.context-length 4096": "max_positions is 128",
        "masked-docs --model.encoder.positions none --export out": BERT,
        "--model.compute.attention cudnn": "attention is 'cudnn', which cannot compute this here",
        "--model.compute.attention pallas": "attention is 'pallas', a kernel for TPUs, and this is a",
        "--training.batch-size 10 --training.accumulation 4": "accumulation divides",
        "--mesh.tensor 3": "devices, but there are",
        "--mesh.context 3": "context_length is 128, which does not divide over 3 devices (--mesh.context)",
        "dates --mesh.context 2": "target_length is 11, which does not divide over 2 devices (--mesh.context)",
        "dates --data.path dates.txt": "dates needs no file",
        "dates --data.source-length 5": "at least",
        "--model.vocab-size 1023": "1024 ids and the model a vocabulary of 1023",
        "--resume perhaps": "--resume",
        "--run nowhere --report": "there is no run in nowhere to report on",
    }.items(),
)
def test_what_cannot_be_is_refused(refuse, folder, arguments, message):
    (folder / "others").mkdir()
    for name in ("file", "others/thesis.tex", "others/pairs.tsv"):
        (folder / name).write_text("precious")
    assert message in refuse(arguments)


def test_what_a_report_cannot_show(refuse, run, monkeypatch):
    told = "--report trains nothing, so that training.steps cannot be changed"
    assert told in refuse(again("--report --steps 9"))
    assert "train.py --report runs in one" in refuse(again("--report --distributed.coordinator localhost:1"))
    (run / "metrics.jsonl").unlink()
    assert "has logged nothing yet" in refuse("--run run --report")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert "2 processes were started, and train.py --report runs in one" in refuse("--run run --report")


def test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing(run, end_of):
    command = again("--resume no --lr 1e38 --optimizer.warmup-steps 0 --optimizer.schedule constant")
    command += " --training.steps 20 --training.checkpoint-every 1"
    status, _, errors = end_of(command)
    assert (status, errors.count("\n")) == (1, 1)
    for told in ("step 2 is nan", "decoder.blocks.0", "in row 1 of 2, which begins '"):
        assert told in errors
    assert "try a lower --optimizer.learning-rate" in errors
    assert not list((run / "checkpoints").iterdir())
    assert not (run / "saved.json").exists()


@pytest.mark.parametrize(
    "variables, count",
    [
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n1", "OMPI_COMM_WORLD_SIZE": "4"}, "4 processes were started"),
        ({"PMI_SIZE": "8"}, "8 processes were started"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "nowhere.txt does not exist"),
        ({"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": ""}, "nowhere.txt does not exist"),
    ],
)
def test_several_processes_do_not_train_alone_each(refuse, monkeypatch, variables, count):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert count in refuse("text --data.path nowhere.txt")
