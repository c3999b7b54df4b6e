from tests.object_server import _object_server as _object_server
from tests.object_server import bucket as bucket
from tests.object_server import object_server as object_server
