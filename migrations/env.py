"""Run the migrations on a connection that the caller opened, or on the file given with `-x index=PATH`."""

from pathlib import Path

from alembic import context

from prefixbank.schema import make_engine, metadata


def run(connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        render_as_batch=True,
        transaction_per_migration=False,
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    path = context.get_x_argument(as_dictionary=True).get("index")
    if path is None:
        raise SystemExit("say which index: alembic -x index=bank/index.sqlite3 ...")
    engine = make_engine(Path(path), read_only=False, durability="full", busy_timeout_s=15)
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        run(connection)
