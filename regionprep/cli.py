"""The command `prep`: one function a command, no logic; what is heavy is imported inside."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from regionprep.errors import PrepError

if TYPE_CHECKING:
    from regionprep.workspace import Workspace

app = typer.Typer(
    name="prep",
    help="Region features for image captioning: from images to scored captions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help answers within 0.3 s; rich alone would take longer to import.
    rich_markup_mode=None,
)


_chosen: dict[str, Path | None] = {"workspace": None}

Detector = Annotated[str | None, typer.Option(help="A name in manifests/detectors/, or a YAML.")]
Backbone = Annotated[
    str | None,
    typer.Option(help="A name in manifests/backbones/, a YAML, timm:NAME or open_clip:NAME/TAG."),
]
Weights = Annotated[Path | None, typer.Option(help="A weights file instead of a download.")]
On = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")]
ShardSize = Annotated[int | None, typer.Option(min=1, help="Images a shard: 2048.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Images or crops a forward pass.")]
Force = Annotated[bool, typer.Option("--force", help="Start over where settings have changed.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 if any image failed.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Share the work among N processes of this machine.")
]
Cluster = Annotated[
    str | None, typer.Option(help="Share it on a Dask scheduler: tcp://HOST:PORT, or tls://.")
]
TlsCaFile = Annotated[Path | None, typer.Option(help="The authority's certificate, for tls://.")]
TlsCert = Annotated[Path | None, typer.Option(help="Our certificate, for tls://.")]
TlsKey = Annotated[Path | None, typer.Option(help="Our certificate's key, for tls://.")]
Shards = Annotated[
    str | None,
    typer.Option(help="Make only these, in a batch system: 0-99/1000 of a plan of 1000 shards."),
]
Beam = Annotated[int, typer.Option(min=1, help="Beam size; 1 is greedy.")]
RunName = Annotated[
    str | None, typer.Option("--run", help="A run's name; not needed where only one is trained.")
]
Split = Annotated[str, typer.Option(help="Which split.")]


@app.callback()
def choose(
    workspace: Annotated[
        Path | None,
        typer.Option("--workspace", "-w", help="Work there instead of here or above."),
    ] = None,
) -> None:
    """Region features for image captioning: from images to scored captions."""
    _chosen["workspace"] = workspace


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="The workspace to make.")],
    dataset: Annotated[
        str | None, typer.Option(help="scenes, coco, flickr8k, flickr30k, or your own YAML.")
    ] = None,
    images: Annotated[Path | None, typer.Option(help="The folder of images.")] = None,
    captions: Annotated[
        list[Path] | None,
        typer.Option(help="Karpathy JSON, COCO annotations, JSONL or CSV; repeat for several."),
    ] = None,
) -> None:
    """Make a workspace for a dataset, or for a bare folder of images."""
    from regionprep.pipeline.datasets import initialise

    made = initialise(folder, dataset=dataset, images=images, captions=captions or [])
    print(f"workspace {made.root}: {made.dataset.summary}\nnext: cd {folder} && prep run")


@app.command()
def splits(
    restval: Annotated[
        bool | None, typer.Option("--restval/--no-restval", help="Whether restval joins train.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Draw the splits by this seed.")] = None,
    val: Annotated[int | None, typer.Option(min=0, help="Drawn validation images.")] = None,
    test: Annotated[int | None, typer.Option(min=0, help="Drawn test images.")] = None,
    max_pixels: Annotated[
        int | None, typer.Option(min=1, help="Refuse images of more pixels than that.")
    ] = None,
    skip_unmatched: Annotated[
        bool, typer.Option(help="Leave out images without captions and captions without image.")
    ] = False,
) -> None:
    """Write images.parquet and captions.parquet."""
    from regionprep.pipeline.splits import make_splits

    print(
        make_splits(
            _workspace(),
            restval=restval,
            seed=seed,
            val=val,
            test=test,
            max_pixels=max_pixels,
            skip_unmatched=skip_unmatched,
        )
    )


@app.command()
def vocab(
    min_count: Annotated[
        int | None, typer.Option(min=1, help="Keep words seen at least this often in train.")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Words a caption keeps: 16; with --bpe its tokens: 20."),
    ] = None,
    bpe: Annotated[
        str | None,
        typer.Option(help="A BPE tokenizer instead of words: a folder, or a hub name like gpt2."),
    ] = None,
) -> None:
    """Build the vocabulary from the captions of the train split."""
    from regionprep.pipeline.vocab import make_vocabulary

    print(make_vocabulary(_workspace(), min_count=min_count, max_length=max_length, bpe=bpe))


@app.command()
def detect(
    detector: Detector = None,
    weights: Weights = None,
    boxes: Annotated[
        Path | None, typer.Option(help="COCO results.json or instances.json, for 'boxes'.")
    ] = None,
    min_boxes: Annotated[int | None, typer.Option(min=0, help="Boxes an image, at least.")] = None,
    max_boxes: Annotated[int | None, typer.Option(min=1, help="Boxes an image, at most.")] = None,
    score_threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Confidence that keeps a box.")
    ] = None,
    nms_threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Overlap that drops a box of one class.")
    ] = None,
    shard_size: ShardSize = None,
    batch_size: BatchSize = None,
    device: On = "auto",
    workers: Workers = None,
    cluster: Cluster = None,
    tls_ca_file: TlsCaFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    shards: Shards = None,
    force: Force = False,
    strict: Strict = False,
) -> None:
    """Find regions in every image."""
    from regionprep.pipeline.cluster import Team
    from regionprep.pipeline.detect import run_detect
    from regionprep.pipeline.share import Share

    outcome = run_detect(
        _workspace(),
        detector,
        weights=weights,
        boxes_file=boxes,
        min_boxes=min_boxes,
        max_boxes=max_boxes,
        score_threshold=score_threshold,
        nms_threshold=nms_threshold,
        shard_size=shard_size,
        batch_size=batch_size,
        device=device,
        team=Team.chosen(workers, cluster, tls_ca_file, tls_cert, tls_key),
        share=Share.chosen(shards),
        force=force,
    )
    print(outcome)
    _fail_if(strict and outcome.failed)


@app.command()
def extract(
    backbone: Backbone = None,
    detector: Detector = None,
    weights: Weights = None,
    grid: Annotated[bool, typer.Option("--grid", help="A feature map, not regions.")] = False,
    dtype: Annotated[
        Literal["float16", "float32"], typer.Option(help="How features are stored.")
    ] = "float16",
    shard_size: ShardSize = None,
    batch_size: BatchSize = None,
    device: On = "auto",
    workers: Workers = None,
    cluster: Cluster = None,
    tls_ca_file: TlsCaFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    shards: Shards = None,
    force: Force = False,
    strict: Strict = False,
) -> None:
    """Compute a feature vector for every region."""
    from regionprep.pipeline.cluster import Team
    from regionprep.pipeline.extract import run_extract
    from regionprep.pipeline.share import Share

    outcome = run_extract(
        _workspace(),
        detector,
        backbone,
        weights=weights,
        grid=grid,
        dtype=dtype,
        shard_size=shard_size,
        batch_size=batch_size,
        device=device,
        team=Team.chosen(workers, cluster, tls_ca_file, tls_cert, tls_key),
        share=Share.chosen(shards),
        force=force,
    )
    print(outcome)
    _fail_if(strict and outcome.failed)


@app.command("import")
def import_features(
    format_name: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT", help="tsv, hdf5, numpy (also video), lmdb, tar or parquet."
        ),
    ],
    paths: Annotated[list[Path], typer.Argument(help="Files or folders.")],
    detector: Annotated[str, typer.Option(help="What to call the boxes here.")],
    backbone: Annotated[str, typer.Option(help="What to call the features here.")],
    ids: Annotated[
        Literal["exact", "stem", "number"],
        typer.Option(
            help="A record belongs to the image of the same id, file name, or last number."
        ),
    ] = "exact",
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Images without features become marked rows.")
    ] = False,
    dtype: Annotated[
        Literal["float16", "float32"] | None,
        typer.Option(help="How features are stored; as they are by default."),
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Of hdf5, ID_grids.")] = False,
    column: Annotated[str | None, typer.Option(help="Of parquet, the vectors' column.")] = None,
    id_column: Annotated[str | None, typer.Option(help="Of parquet, the ids' column.")] = None,
    shard_size: ShardSize = 2048,
    force: Force = False,
    strict: Strict = False,
) -> None:
    """Bring in features that another project has made."""
    from regionprep.pipeline.exchange import run_import

    imported = run_import(
        _workspace(),
        format_name,
        paths,
        detector=detector,
        backbone=backbone,
        ids=ids,
        skip_missing=skip_missing,
        dtype=dtype,
        grid=grid,
        column=column,
        id_column=id_column,
        shard_size=shard_size,
        force=force,
    )
    print(imported)
    _fail_if(strict and imported.failed)


@app.command("export")
def export_features(
    format_name: Annotated[
        str, typer.Argument(metavar="FORMAT", help="tsv, tsv10, hdf5, numpy or lmdb.")
    ],
    target: Annotated[Path, typer.Argument(help="The file or folder to make.")],
    detector: Detector = None,
    backbone: Backbone = None,
) -> None:
    """Write features in another project's format."""
    from regionprep.pipeline.exchange import run_export

    print(run_export(_workspace(), format_name, target, detector=detector, backbone=backbone))


@app.command()
def train(
    model: Annotated[
        str | None, typer.Option(help="A name in manifests/models/, or a YAML.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="A size the manifest names.")] = None,
    detector: Detector = None,
    backbone: Backbone = None,
    name: Annotated[str | None, typer.Option(help="The run's name.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, order and dropout.")] = 0,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the manifest's.")] = None,
    batch_images: Annotated[int | None, typer.Option(min=1, help="Images a step.")] = None,
    device: On = "auto",
    precision: Annotated[
        Literal["32-true", "bf16-mixed", "16-mixed"],
        typer.Option(help="As Fabric has it."),
    ] = "32-true",
    force: Force = False,
) -> None:
    """Train a captioner; run again to go on where it stopped."""
    from regionprep.job import train_captioner

    print(
        train_captioner(
            _workspace(),
            model=model,
            preset=preset,
            detector=detector,
            backbone=backbone,
            name=name,
            seed=seed,
            epochs=epochs,
            batch_images=batch_images,
            device=device,
            precision=precision,
            force=force,
        )
    )


@app.command()
def caption(
    photos: Annotated[
        list[Path] | None, typer.Argument(help="Photographs; none: a whole split.")
    ] = None,
    run: RunName = None,
    split: Split = "test",
    beam: Beam = 3,
    device: On = "auto",
) -> None:
    """Caption a split, or photographs from detection on."""
    from regionprep import captioning

    if photos:
        for photo, text in captioning.caption_photos(
            _workspace(), photos, run=run, beam_size=beam, device=device
        ):
            print(f"{photo}: {text}")
    else:
        print(
            captioning.caption_split(
                _workspace(), run=run, split=split, beam_size=beam, device=device
            )
        )


@app.command()
def evaluate(run: RunName = None, split: Split = "test") -> None:
    """Score the captions of a split: BLEU, ROUGE-L, CIDEr, CIDEr-D."""
    from regionprep.captioning import evaluate_split

    print(evaluate_split(_workspace(), run=run, split=split))


@app.command()
def sheet(
    run: RunName = None,
    split: Split = "test",
    count: Annotated[int, typer.Option(min=1, help="How many images.")] = 12,
) -> None:
    """Draw a contact sheet of images with their boxes and captions."""
    from regionprep.captioning import draw_sheet

    print(draw_sheet(_workspace(), run=run, split=split, count=count))


@app.command()
def retrieval(detector: Detector = None, backbone: Backbone = None) -> None:
    """Check that neighbours by features share caption words."""
    from regionprep.job import check_retrieval

    print(check_retrieval(_workspace(), detector=detector, backbone=backbone))


@app.command()
def run(device: On = "auto") -> None:
    """Do every stage that is not done, from splits to scores."""
    from regionprep.job import run_all

    run_all(_workspace(), device=device)


@app.command()
def status() -> None:
    """Show which stages are done, and the command that does the next."""
    from regionprep.job import describe

    print(describe(_workspace()))


@app.command()
def verify(
    path: Annotated[
        Path | None, typer.Argument(help="A folder of regions or features; none: the workspace.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Compare footers and sizes only, no checksums.")
    ] = False,
) -> None:
    """Find every damaged, missing, foreign or surplus part; exit with 1 if there is one."""
    from regionprep.pipeline.verify import verify_path

    report = verify_path(path or _workspace().root, quick=quick)
    print(report)
    _fail_if(report.faults)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A folder of regions or features, or one part.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a folder holds: columns, counts, provenance, rows, histograms."""
    from regionprep.pipeline.inspection import inspect_path

    found = inspect_path(path)
    print(found.as_json() if as_json else found)


@app.command()
def merge(
    target: Annotated[Path, typer.Argument(help="The folder to make.")],
    sources: Annotated[list[Path], typer.Argument(help="Finished folders of other images.")],
    shard_size: Annotated[
        int | None, typer.Option(min=1, help="Images a shard, if not as in the sources.")
    ] = None,
    force: Force = False,
) -> None:
    """Make one folder of several with other images and the same settings."""
    from regionprep.pipeline.merge import merge as merge_folders

    print(merge_folders(target, sources, shard_size=shard_size, force=force))


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="Where to work.")] = Path("demo"),
    device: On = "auto",
) -> None:
    """Run the main job on the embedded scenes and draw what came out."""
    from regionprep.job import run_demo

    run_demo(folder, device=device)


def main() -> NoReturn:
    """Run `prep`: 0 is done, 1 failed images under --strict, 2 a fault to mend, 130 stopped."""
    from regionprep.memory import keep_freed_memory

    keep_freed_memory()
    try:
        app()
    except PrepError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _workspace() -> Workspace:
    from regionprep.workspace import Workspace

    chosen = _chosen["workspace"]
    return Workspace.open(chosen) if chosen else Workspace.find()


def _fail_if(failed: object) -> None:
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
