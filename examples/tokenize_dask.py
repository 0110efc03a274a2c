"""Tokenize on the workers of a Dask cluster; killed and started again, it resumes.

pip install 'unbroken[train,dask]'
python tokenize_dask.py text data/train                                  # a cluster on this machine
python tokenize_dask.py text data/train --scheduler tcp://10.0.0.1:8786  # yours
"""

import argparse
from pathlib import Path

from distributed import Client, LocalCluster

from unbroken import data

parser = argparse.ArgumentParser()
parser.add_argument("input_dir", type=Path)
parser.add_argument("output_dir", type=Path)
parser.add_argument("--tokenizer", default="bytes")
parser.add_argument("--scheduler")
parser.add_argument("--workers", type=int, default=2)


def main() -> None:
    asked = parser.parse_args()
    request = data.TokenizeRequest(asked.input_dir, asked.output_dir, asked.tokenizer)
    cluster = asked.scheduler or LocalCluster(
        n_workers=asked.workers, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
    )
    with Client(cluster) as client:
        # pure=False: a unit is done for its files, not for a result that Dask may keep.
        report = data.tokenize_with(client.get_executor(pure=False), request)
    print(f"{report.totals.documents} documents, {report.totals.tokens} tokens, {report.totals.shards} shards")


if __name__ == "__main__":
    main()
