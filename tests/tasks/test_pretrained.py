"""Model folders: saved in every weight format, found by name, described by a card, uploaded to the hub."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cedd
from cedd.cli import main
from cedd.models import locate as locating
from cedd.models.weights import FORMS
from cedd.names import hub_failure
from cedd.tasks import LanguageModel, hub, load
from tests.tasks.models import save_random


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture
def packaged_models(tmp_path, monkeypatch):
    """A package with one model, english-char."""
    monkeypatch.setattr(locating, "pretrained_root", lambda: tmp_path / "pretrained")
    save_random(tmp_path / "pretrained" / "english-char")
    return tmp_path / "pretrained"


def test_packaged_model_is_found_by_name(packaged_models):
    assert cedd.PRETRAINED == ("english-char",)
    assert load("english-char", device="cpu").folder.path == packaged_models / "english-char"


def test_local_folder_takes_precedence_over_package(packaged_models, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_random(tmp_path / "english-char", "uniform")
    assert load("english-char", device="cpu").process.mask_id is None


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("english-chra", "no run or model at english-chra; did you mean english-char?"),
        ("", "no run or model at ''"),
        ("RUNS/frist", "no run or model at RUNS/frist; did you mean RUNS/first?"),
        ("RUNS/zzzzzz", "no run or model at RUNS/zzzzzz"),
        ("/no/such/english-char", "no run or model at /no/such/english-char; did you mean english-char?"),
    ],
)
def test_unknown_model_name_gets_suggestion(packaged_models, run, name, hint):
    place = str(run.parent)
    with pytest.raises(ValueError) as error:
        load(name.replace("RUNS", place), device="cpu")
    assert str(error.value) == hint.replace("RUNS", place)


def test_owner_model_name_is_downloaded_from_hub(packaged_models, run, monkeypatch):
    asked = []

    def download(name, **options):
        asked.append((name, options["revision"]))
        if name != "owner/model":
            raise OSError("no network")
        return str(run)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert LanguageModel.from_pretrained("owner/model", device="cpu", revision="v2").folder.path == run
    assert asked == [("owner/model", "v2")]
    with pytest.raises(
        ValueError,
        match=r"at owner/english-chr; could not reach the hub; check the connection and HF_HUB_OFFLINE; did you",
    ):
        LanguageModel.from_pretrained("owner/english-chr", device="cpu", revision=None)


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (404, OSError, "the hub does not have it"),
        (503, OSError, "the hub answered with status 503"),
        (None, ConnectionError, "could not reach the hub; check the connection and HF_HUB_OFFLINE"),
        (None, ValueError, "not a name"),
    ],
)
def test_hub_failure_distinguishes_unreachable_hub_from_missing_model(status, error, said):
    failed = error("not a name\nand more about it")
    failed.response = None if status is None else SimpleNamespace(status_code=status)
    assert hub_failure(failed) == said


@pytest.mark.parametrize("form", FORMS)
def test_model_round_trips_in_every_weight_format(run, tmp_path, form):
    """float32 is exact; with bf16, int8 and deflated weights the bound changes by at most 0.2%, 1% and 2%."""
    model = load(run, device="cpu")
    model.save_pretrained(tmp_path / "a" / form, weights=form)
    other = LanguageModel.from_pretrained(tmp_path / "a" / form, device="cpu")
    assert other.folder.weights == form
    assert all(parameter.dtype == torch.float32 for parameter in other.model.parameters())
    text = "the cat sat on the mat. " * 4
    bounds = [m.perplexity(text, draws=16).nats_per_token for m in (model, other)]
    assert bounds[1] == pytest.approx(bounds[0], rel={"float32": 0, "bf16": 2e-3, "int8": 1e-2, "deflated": 2e-2}[form])
    other.save_pretrained(tmp_path / "again")  # keeps its format
    again = load(tmp_path / "again", device="cpu")
    assert again.folder.weights == form
    for one, two in zip(other.model.parameters(), again.model.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=1e-6, atol=0)


def test_save_killed_between_renames_is_harmless_or_detected(run, tmp_path, monkeypatch):
    """If only the weight format changes, either file may be the old one; another model's files do not match."""

    class Killed(BaseException):
        pass

    def kill_at_rename(number: int, save) -> None:
        whole, calls = Path.replace, iter(range(100))

        def replace(path: Path, target: Path) -> Path:
            if target.parent == folder and next(calls) == number:
                raise Killed
            return whole(path, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", replace)
            with pytest.raises(Killed):
                save()

    folder = tmp_path / "model"
    model, x = load(run, device="cpu"), torch.zeros(1, 8, dtype=torch.int64)
    right = model.model(x, torch.ones(1))
    other = load(save_random(tmp_path / "other", "roulette", "cedd"), device="cpu")
    for number in range(4):  # before the card, the tokenizer, config.json, and the weights
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        ours = load(folder, device="cpu")
        kill_at_rename(number, lambda ours=ours: ours.save_pretrained(folder, weights="bf16"))
        again = load(folder, device="cpu")
        assert (again.model(x, torch.ones(1)) - right).abs().max() < 0.1
        assert again.folder.weights == "float32"
        kill_at_rename(number, lambda: other.save_pretrained(folder, force=True))
        if number < 3:
            assert load(folder, device="cpu").method.name == "bayes"
        else:
            with pytest.raises(ValueError, match=r"config\.json does not describe the model in model\.safetensors"):
                load(folder, device="cpu")
        other.save_pretrained(folder, force=True)
        assert load(folder, device="cpu").method.name == "cedd"


def test_unknown_weight_format_is_rejected(run, tmp_path):
    model = load(run, device="cpu")
    with pytest.raises(ValueError, match="not as 'int2'"):
        model.save_pretrained(tmp_path / "x", weights="int2")
    model.save_pretrained(tmp_path / "x", weights="int8")
    file = tmp_path / "x" / "config.json"
    file.write_text(file.read_text().replace('"int8"', '"int2"'))
    with pytest.raises(ValueError, match="weights are stored as float32, bf16, int8, deflated, not as 'int2'"):
        load(tmp_path / "x", device="cpu")


def test_extra_config_is_kept_and_shown_on_card(run, tmp_path):
    extra = {
        "title": "english-char",
        "correction": {"threshold": 0.4},
        "training": {"data": "Books.", "command": "cedd train char", "steps": 12345},
        "data": {"train": {"blocks": 10, "length": 32}},
        "results": {
            "a book": {
                "fixed": {"share": 0.81239, "low": 0.79, "high": 0.83, "total": 7123},
                "text": "a|b",
                "seeds": [1, 2],
            }
        },
    }
    load(run, device="cpu").save_pretrained(tmp_path / "one", extra=extra)
    load(tmp_path / "one", device="cpu").save_pretrained(tmp_path / "two", weights="int8")
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert {name: config[name] for name in extra} == extra
    card = (tmp_path / "two" / "README.md").read_text()
    for said in ("# english-char", "threshold 0.4", "cedd train char", "| steps | 12,345 |", "| train | 320 tokens |"):
        assert said in card
    for said in (
        "| fixed | 81.2% (79 to 83) of 7,123 |",
        "a\\|b",
        "[1, 2]",
        "int8 on disk",
        "inserts and deletes letters only",
    ):
        assert said in card


def test_failed_upload_is_reported(run, monkeypatch):
    class Api:
        def __init__(self, **options):
            pass

        def create_repo(self, repo_id, **options):
            raise OSError("[Errno -2] Name or service not known")

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    with pytest.raises(
        ValueError, match=r"owner/model could not be uploaded to the hub \(OSError\); check the network"
    ):
        load(run, device="cpu").push_to_hub("owner/model")
    with pytest.raises(TypeError, match="privat"):
        load(run, device="cpu").push_to_hub("owner/model", privat=True)


def test_push_to_hub_uploads_model_folder(run, monkeypatch):
    seen = {}

    class Api:
        def __init__(self, **options):
            pass

        def create_repo(self, repo_id, **options):
            return type("Url", (), {"repo_id": repo_id})

        def upload_folder(self, folder_path, repo_id, **options):
            seen.update({file.name: file.stat().st_size for file in folder_path.iterdir()})
            seen["model"] = load(folder_path, device="cpu")
            return f"https://hub/{repo_id}"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    model = load(run, device="cpu")
    assert model.push_to_hub("owner/model", private=True) == "https://hub/owner/model"
    assert {"config.json", "model.safetensors", "README.md", "cedd_tokenizer.json"} <= set(seen)
    assert torch.equal(seen["model"].folder.model.head.weight, model.folder.model.head.get_parameter("weight"))
    assert issubclass(hub.HubModel, __import__("huggingface_hub").ModelHubMixin)


def test_card_shows_measured_results(run, tmp_path, monkeypatch, capsys):
    """Run cedd evaluate --json and cedd export --results, then load the folder again: card, figures and outputs."""
    monkeypatch.setenv("CEDD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text("the cat sat on the mat. " * 40, encoding="utf-8")
    words = ["evaluate", str(run), "--data", str(tmp_path / "book.txt"), "--draws", "2", "--device", "cpu", "--json"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    bound = json.loads(printed)["runs"][0]["bounds"]["tight"]
    (tmp_path / "figures.json").write_text(printed, encoding="utf-8")
    out = tmp_path / "model"
    given = ["export", str(run), "--out", str(out), "--results", str(tmp_path / "figures.json")]
    assert main([*given, "--weights", "float32", "--device", "cpu"]) == 0
    card = (out / "README.md").read_text(encoding="utf-8")
    low, high = bound["perplexity_ci95"]
    row = f"| perplexity per token (tight) | {bound['perplexity']:.4g} ({low:.4g} to {high:.4g}) |"
    assert row in card
    assert f"| bits per byte (tight) | {bound['bits_per_byte']:.4g} |" in card
    assert "record_sha256" not in card
    again = LanguageModel.from_pretrained(out, device="cpu")
    again.save_pretrained(tmp_path / "again")
    assert row in (tmp_path / "again" / "README.md").read_text(encoding="utf-8")
    x, sigma = torch.randint(0, again.process.vocab_size, (2, 8)), torch.tensor([0.1, 2.0])
    last = LanguageModel.from_pretrained(tmp_path / "again", device="cpu")
    assert torch.equal(last.model(x, sigma), load(run, device="cpu").model(x, sigma))


def test_card_of_imported_network_names_source_and_no_license(run, tmp_path):
    model = load(run, device="cpu")
    model.save_pretrained(tmp_path / "own")
    model.save_pretrained(tmp_path / "theirs", extra={"imported": {"family": "SEDD", "source": "louaaron/sedd-small"}})
    own, theirs = ((tmp_path / name / "README.md").read_text(encoding="utf-8") for name in ("own", "theirs"))
    assert "license: apache-2.0" in own
    assert "## Source" not in own
    assert "license: other\nbase_model: louaaron/sedd-small" in theirs
    assert "apache" not in theirs
    assert "family SEDD, trained and released by its authors as `louaaron/sedd-small`" in theirs
