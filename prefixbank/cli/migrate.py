"""Own `prefixbank migrate`: bringing an older index to the newest schema."""

from __future__ import annotations

import typer

from prefixbank.cli.options import DryRunOption, JsonOption, chosen_bank
from prefixbank.cli.output import print_document, print_text


def run(ctx: typer.Context, dry_run: DryRunOption = False, as_json: JsonOption = False) -> None:
    """Bring the bank's index to the newest schema; a newer one is refused and left as it is."""
    from prefixbank.index import Index
    from prefixbank.rootfile import INDEX_FILE, read_bank_file
    from prefixbank.schema import HEAD_REVISION, KNOWN_REVISIONS

    choice = chosen_bank(ctx)
    read_bank_file(choice.root)

    def open_index(*, read_only: bool) -> Index:
        path = choice.root / INDEX_FILE
        return Index(path, read_only=read_only, durability="full", busy_timeout_s=choice.busy_timeout_s)

    index = open_index(read_only=True)
    try:
        revision = index.revision
        if revision is not None and revision not in KNOWN_REVISIONS:
            index.require_current()
    finally:
        index.close()
    if revision != HEAD_REVISION and not dry_run:
        index = open_index(read_only=False)
        try:
            index.migrate()
        finally:
            index.close()
    if as_json:
        print_document(
            root=str(choice.root.absolute()),
            dry_run=dry_run,
            from_revision=revision,
            to_revision=HEAD_REVISION,
            changed=revision != HEAD_REVISION,
        )
    elif revision == HEAD_REVISION:
        print_text(f"{choice.root} has the newest schema, {revision}")
    else:
        done = "would go" if dry_run else "went"
        print_text(f"{choice.root} {done} from schema {revision or '(empty)'} to {HEAD_REVISION}")
