"""The commands: the name and the help of each. Its settings and its code are imported when it is used."""

from isthmus_services.settings.command import commands_of

FAMILIES = {
    "keys": "create and show signing keys, and verify who signed an object",
    "members": "list and change the members of a signed run",
    "charter": "agree on a charter of several owners: who decides, and what each member's work counts for",
}

COMMANDS = commands_of(
    "isthmus_services",
    "isthmus_services.settings.declared",
    (
        ("", "Demo", "train a small model with four learner processes, show progress and report the result"),
        ("", "Init", "create a run: write its run object and version 0 of the model"),
        (
            "",
            "Create",
            "create a signed run with its bucket, keys, members and users, and a folder for each participant",
        ),
        ("", "Syncer", "merge the updates of learners; any number of syncers may serve a run"),
        ("", "Learner", "train with the built-in trainer or your own"),
        ("", "Status", "show versions, learners and why they are behind, rejections and the ledger; --watch: live"),
        ("", "Board", "serve a web page of the run, live and at any past moment, or write it to one file"),
        ("", "Doctor", "check the machine, store, bus and permissions of a run, and give advice for each problem"),
        ("", "Replay", "fold the log again and compare every digest, or fold it under other rules (--set)"),
        ("", "Audit", "report who agreed on what, what each member contributed, and what of it replay verified"),
        ("", "Explain", "print the history of one update, commit or fragment"),
        ("", "Export", "write the global model to a safetensors file, a transformers folder or a checkpoint folder"),
        ("", "Heal", "restart a fragment whose log can no longer be folded (a dry run by default)"),
        ("", "Follow", "write every new version of the global model to a folder, or run a command on it"),
        ("", "Promote", "promote a version whose measurements satisfy the charter's gate, or say why it fails"),
        ("", "Gc", "delete objects that the run no longer needs and pack old commits (a dry run by default)"),
        ("keys", "KeysNew", "create an Ed25519 key pair in OpenSSH format"),
        ("keys", "KeysShow", "print the public key and the fingerprint of a key file"),
        ("keys", "KeysVerify", "print who signed an object, and whether the signer may write it"),
        ("charter", "CharterShow", "print the charter, and the changes that wait for approvals"),
        ("charter", "CharterPropose", "propose a charter, or another one"),
        ("charter", "CharterApprove", "approve a change; the last approval needed puts it into force"),
        ("members", "MembersList", "list the members, their roles and their keys"),
        ("members", "MembersAdd", "add a member with its public key"),
        ("members", "MembersRemove", "remove a member, from a stated commit on"),
        ("members", "MembersRotate", "change the key or bucket of a member, or the key that owns the run"),
        ("", "Access", "write users and policies for each participant: of Redis, AWS, MinIO, Ceph and SeaweedFS"),
    ),
)
