"""Google's object storage on loopback, for the tests of buckets: python storage_server.py PORT

The server of gcp-storage-emulator, in memory, with additions that clients rely on: the generation
of an object, conditions on it (writers of a checkpoint agree on its manifest by these), and moving
an object. It ends with its standard input.
"""

import sys
from http import HTTPStatus

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects


def generation(storage, bucket, name):
    """Returns the generation of an object; "0" if there is none."""
    try:
        return storage.get_file_obj(bucket, name)["generation"]
    except NotFound:
        return "0"


def conditional(handler):
    """Returns the handler of a request for one object, with conditions."""

    def handle(request, response, storage):
        given = lambda key: request.query.get(key, [None])[0]
        name = request.params.get("object_id") or given("name")
        at = storage, request.params["bucket_name"], name
        if given("ifGenerationMatch") not in (None, generation(*at)):
            response.status = HTTPStatus.PRECONDITION_FAILED
        elif given("ifGenerationNotMatch") == generation(*at) != "0":
            response.status = HTTPStatus.NOT_MODIFIED
        else:
            handler(request, response, storage)
            response["x-goog-generation"] = generation(*at)

    return handle


def move(request, response, storage):
    request.params["dest_bucket_name"] = request.params["bucket_name"]
    objects.copy(request, response, storage)
    if response.status == HTTPStatus.OK:
        storage.delete_file(request.params["bucket_name"], request.params["object_id"])


MOVE = r"^/storage/v1/b/(?P<bucket_name>[^/]+)/o/(?P<object_id>.+)/moveTo/o/(?P<dest_object_id>.+)$"
OF_ONE = (objects.get, objects.download, objects.insert, objects.delete)

if __name__ == "__main__":
    server.HANDLERS = (
        (MOVE, {"POST": move}),
        *(
            (place, {m: conditional(h) if h in OF_ONE else h for m, h in handlers.items()})
            for place, handlers in server.HANDLERS
        ),
    )
    running = server.create_server("127.0.0.1", int(sys.argv[1]), True, default_bucket="bucket")
    running.start()
    print("ready", flush=True)
    sys.stdin.read()
    running.stop()
