"""Errors of mirrors: the address, the client library, what an object store refuses, and whose mirror it is."""

from typing import Final, Literal

from unbroken.errors.tree import CheckpointError, Each, Help, StorageError, UsageError

_HELD: Final = "local checkpoints that are not mirrored yet are kept"
# True of a run that saves straight to an object store, too.
_INTACT: Final = "no checkpoint was deleted"
_CREDENTIALS: Final = {
    "none": "no credentials found for {mirror}",
    "refused": "the credentials for {mirror} were refused",
    "expired": "the credentials for {mirror} have expired",
    "unreadable": "the credentials for {mirror} are malformed, or their file cannot be read",
}


class BadMirror(UsageError):
    """A text that is no address of a mirror."""

    kind = "bad-mirror"
    text: str
    complaint: str
    HEADLINE = "not a mirror address: {complaint}"
    AT = "{text}"
    SO = "a mirror is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIRECTORY"


class ClientMissing(UsageError):
    """The client library for object stores is not installed."""

    kind = "client-missing"
    mirror: str
    HEADLINE = "object stores need the package obstore"
    AT = "{mirror}"
    SO = "file:/// mirrors work without it"
    HELP = (Help("pip install 'unbroken[mirror]'", "install it"),)


class BadEndpoint(UsageError):
    """A variable that names a server and holds no address of one."""

    kind = "bad-endpoint"
    mirror: str
    variable: str
    # The value is not shown: it may hold a password.
    HEADLINE = "{variable} is not an http:// or https:// address"
    AT = "{mirror}"
    SO = "it names the server that is asked in place of the cloud's own; nothing was sent"
    HELP = (Help("export {variable}=https://HOST:PORT", "name the server, or unset the variable"),)


class BucketMissing(StorageError):
    """The bucket or container of a mirror does not exist."""

    kind = "bucket-missing"
    mirror: str
    bucket: str
    HEADLINE = "the bucket {bucket} does not exist"
    AT = "{mirror}"
    SO = f"nothing is created: buckets are yours to make; {_INTACT}"


class NoCredentials(StorageError):
    """No credentials for a mirror, or ones that the store refuses."""

    kind = "no-credentials"
    mirror: str
    problem: Literal["none", "refused", "expired", "unreadable"]
    AT = "{mirror}"
    SO = _INTACT
    HELP = (Help("unbroken explain {kind}", "where credentials are read from"),)

    def headline(self) -> str:
        return self.filled(_CREDENTIALS[self.problem])


class MirrorReadOnly(StorageError):
    """The credentials of a mirror do not allow the operation."""

    kind = "mirror-read-only"
    mirror: str
    operation: str
    HEADLINE = "no permission to {operation} objects"
    AT = "{mirror}"
    SO = f"the credentials are valid but their policy does not allow it; {_INTACT}"
    HELP = (Help("unbroken explain {kind}", "the permissions a mirror needs"),)


class WrongRegion(StorageError):
    """A bucket that is in another region than the one the client is configured for."""

    kind = "wrong-region"
    mirror: str
    region: str | None = None
    HEADLINE = "the bucket is in another region"
    AT = "{mirror}"
    SO = _INTACT

    def help(self) -> tuple[Help, ...]:
        return (Help(f"export AWS_REGION={self.region or 'REGION'}", "set the region of the bucket, then try again"),)


class ClockSkewed(StorageError):
    """A signature whose time the store does not accept."""

    kind = "clock-skewed"
    mirror: str
    HEADLINE = "the clock of this machine is too far off for signed requests"
    AT = "{mirror}"
    SO = f"stores accept 15 minutes; {_INTACT}"
    HELP = (Help("timedatectl status", "check whether the clock is synchronized"),)


class MirrorUnreachable(StorageError):
    """A store that cannot be reached, or answers with an error that may pass."""

    kind = "mirror-unreachable"
    mirror: str
    operation: str
    cause: str
    HEADLINE = "could not {operation}: {cause}"
    AT = "{mirror}"
    SO = f"a running job tries again by itself; {_INTACT}"


class MirrorMissing(StorageError):
    """A mirror that was used before and is not there, or one in a directory that does not exist."""

    kind = "mirror-missing"
    mirror: str
    run: str
    complaint: str
    # What to do: make the directory that it is in, begin it again, or, where the run had no other copy, the run anew.
    remedy: Literal["above", "again", "anew"]
    above: str
    HEADLINE = "the mirror is not there: {complaint}"
    AT = "{mirror}"
    SO = f"its disk may not be mounted, or it was moved or emptied; nothing was written there; {_INTACT}"

    def help(self) -> tuple[Help, ...]:
        if self.remedy == "above":
            return (Help(self.filled("mkdir -p {above:sh}"), "make it, if no disk is missing"),)
        if self.remedy == "anew":
            # Nothing else says to the next job that it may begin at step 0.
            moved = Help(self.filled("mv {run:sh} {run:sh}.old"), "start the run over, if they are gone for good")
            return (moved,)
        return (
            Help(self.filled("unbroken mirror {run:sh} --to {mirror:sh}"), "begin it again, if it is gone for good"),
        )


class MirrorDamaged(StorageError):
    """A mirror whose own record cannot be read."""

    kind = "mirror-damaged"
    mirror: str
    key: str
    HEADLINE = "the record {key} is damaged"
    AT = "{mirror}"
    SO = f"nothing is read from this mirror or written there until the record is removed; {_INTACT}"
    HELP = (Help("unbroken explain {kind}", "how to remove it, and what then"),)


class MirrorUnverified(StorageError):
    """An object whose bytes in the store are not those that were sent."""

    kind = "mirror-unverified"
    mirror: str
    key: str
    complaint: str
    HEADLINE = "{key} did not verify: {complaint}"
    AT = "{mirror}"
    SO = f"it does not count as mirrored; {_HELD}"


class MirrorTaken(UsageError):
    """A prefix that holds another run, or a name that another writer has committed."""

    kind = "mirror-taken"
    mirror: str
    complaint: str
    HEADLINE = "the mirror belongs to another run: {complaint}"
    AT = "{mirror}"
    SO = f"nothing was written there; {_INTACT}"
    HELP = (Help("unbroken ls {mirror:sh}", "list what is there"),)


class MirrorDiverged(UsageError):
    """Two copies of a run that were both rewound: the mirror keeps the record of one of them."""

    kind = "mirror-diverged"
    mirror: str
    run: str
    record: str
    HEADLINE = "this run and another copy of it were both rewound, and the mirror follows the other copy"
    AT = "{mirror}"
    SO = "the mirror takes no checkpoints from here and trying again does not help; {record} differs there; " + _HELD
    HELP = (
        Help("unbroken mirror {run:sh} --forget {mirror:sh} --to s3://BUCKET/PREFIX", "mirror this copy elsewhere"),
        Help("unbroken ls {mirror:sh}", "list the checkpoints of the other copy"),
    )


class MirrorEmpty(UsageError):
    """An address at which there is nothing."""

    kind = "mirror-empty"
    mirror: str
    HEADLINE = "nothing is at this address"
    AT = "{mirror}"
    SO = "a run is mirrored to the address that its `mirror` setting names, with its checkpoints below checkpoints/"


class NotMirrored(UsageError):
    """A command about mirrors, and a run that has none."""

    kind = "not-mirrored"
    run: str
    HEADLINE = "this run has no mirror"
    AT = "{run}"
    HELP = (Help("unbroken mirror {run:sh} --to s3://BUCKET/PREFIX", "mirror it"),)


class MirrorIncomplete(StorageError):
    """Checkpoints that could not be mirrored."""

    kind = "mirror-incomplete"
    failed: tuple[tuple[str, str], ...]
    mirrored: int
    HEADLINE = "{failed:n checkpoint} could not be mirrored, {mirrored} done"
    SO = _HELD
    DETAILS = Each("failed", "{0}: {1}", most=8)


class FetchIncomplete(CheckpointError):
    """Checkpoints that no mirror has whole."""

    kind = "fetch-incomplete"
    mirror: str
    failed: tuple[tuple[str, str], ...]
    fetched: int
    HEADLINE = "{failed:n checkpoint} could not be fetched or repaired, {fetched} done"
    AT = "{mirror}"
    SO = "no whole copy was found; nothing was deleted"
    DETAILS = Each("failed", "{0}: {1}", most=8)
