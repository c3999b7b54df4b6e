"""Files of a run wherever they are: on a disk, or as objects in an object store (``s3://bucket/key``)."""

from raggedmoe.storage.object_path import ObjectPath as ObjectPath
from raggedmoe.storage.paths import AnyPath as AnyPath
from raggedmoe.storage.paths import as_path as as_path
