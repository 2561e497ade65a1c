"""Router files on the Hub: a folder with the file and a card, there and back."""

from __future__ import annotations

from types import SimpleNamespace

from huggingface_hub import HfApi, ModelCard

from router_files import made
from TIDE.routing.router_file import RouterFile


def test_a_folder_of_the_hub_comes_back_and_holds_file_and_card_only(tmp_path, caplog):
    file = made()
    file.save_pretrained(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["README.md", "router.safetensors"]
    assert RouterFile.from_pretrained(tmp_path / "saved").as_dict() == file.as_dict()
    assert RouterFile.from_pretrained(str(tmp_path / "saved")).path == tmp_path / "saved" / "router.safetensors"
    assert not caplog.records


def test_the_card_is_that_of_the_file_beside_it_and_one_of_the_user_stays(tmp_path):
    file = made("lens")
    file.save_pretrained(tmp_path / "ours")
    file.max_pending = 77
    file.save_pretrained(tmp_path / "ours", model_card_kwargs={"base_model": "someone/Small-1B"})
    card = ModelCard.load(tmp_path / "ours" / "README.md")
    assert "| draft length | 77 |" in card.text
    assert card.data.base_model == "someone/Small-1B"
    (tmp_path / "README.md").write_text("my project")
    file.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "my project"


def test_the_card_says_what_it_is_for_and_what_was_measured():
    file = made("lens")
    card = file.generate_model_card()
    assert (card.data.license, card.data.library_name) == ("apache-2.0", "tide-inference")
    assert {"early-exit", "tide"} <= set(card.data.tags)
    for expected in (
        f"Made for **{file.fingerprint.describe()}**",
        "| depth | in use | threshold | auroc | agreement |",
        "| 2 | yes | 0.7 | 0.9 | 0.82 |",
        "| tokens_per_second | 30.5 |",
        "| checkpoints | tok/s | kept |",
        "| [0, 2] | 30.5 | yes |",
        "TIDE.TIDE(model, router)",
    ):
        assert expected in card.text
    snippet = card.text.split("```python")[1].split("```")[0]
    compile(snippet, "card", "exec")


def test_pushing_uploads_file_and_card(monkeypatch):
    sent = {}

    def upload(self, *, repo_id, folder_path, **_):
        sent.update({path.name: path.read_bytes() for path in folder_path.iterdir()})
        return f"https://hub/{repo_id}"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **_: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    assert made("identity").push_to_hub("someone/routers") == "https://hub/someone/routers"
    assert set(sent) == {"README.md", "router.safetensors"}
    assert b'hf_hub_download("someone/routers", "router.safetensors")' in sent["README.md"]


def test_an_id_of_the_hub_is_downloaded(monkeypatch, tmp_path):
    made("identity").save(tmp_path / "router.safetensors")
    asked = []

    def download(*arguments, **options):
        asked.append((arguments, options))
        return str(tmp_path / "router.safetensors")

    monkeypatch.setattr("TIDE.routing.router_file.hf_hub_download", download)
    monkeypatch.setattr("TIDE.routing.router_file.hub_trouble", lambda: None)
    assert RouterFile.from_pretrained("someone/routers", revision="v2").strategy == "identity"
    assert asked == [(("someone/routers", "router.safetensors"), {"revision": "v2"})]
