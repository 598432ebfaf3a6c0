"""Remove from the sources of Kubernetes 1.20.2 what no test reaches, so that Go compiles less.

    prune.py SOURCES

Requests, storage, watches, admission, authorization, scheduling and the controllers that tests
need stay as they are. Removed are volume plugins, clouds, certificate signing, admission plugins
that are off by default, and Protobuf for API types: the servers store and send JSON instead, as
all of our clients do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

MANAGER = "cmd/kube-controller-manager/app"
CONTROLLERS = (
    "Service", "NodeIpam", "Route", "CloudNodeLifecycle", "PersistentVolumeBinder",
    "AttachDetach", "VolumeExpand", "EphemeralVolume", "PVCProtection", "PVProtection",
    "DaemonSet", "CronJob", "EndpointSlice", "EndpointSliceMirroring", "CSRSigning",
    "CSRApproving", "CSRCleaner", "BootstrapSigner", "TokenCleaner", "StorageVersionGC",
)  # fmt: skip
ADMISSION_OFF_BY_DEFAULT = (
    "admit", "alwayspullimages", "antiaffinity", "deny", "eventratelimit", "exec",
    "extendedresourcetoleration", "gc", "imagepolicy", "autoprovision", "exists",
    "noderestriction", "podnodeselector", "podtolerationrestriction", "podsecuritypolicy",
    "scdeny", "label",
)  # fmt: skip
# Versions of API groups whose objects no server watches.
UNWATCHED = {
    "admissionregistration": ("v1beta1",),
    "apps": ("v1beta1", "v1beta2"),
    "autoscaling": ("v2beta1", "v2beta2"),
    "batch": ("v2alpha1",),
    "certificates": ("v1beta1",),
    "coordination": ("v1beta1",),
    "discovery": ("v1alpha1",),
    "events": ("v1", "v1beta1"),
    "extensions": ("v1beta1",),
    "flowcontrol": ("v1alpha1",),
    "networking": ("v1beta1",),
    "node": ("v1alpha1", "v1beta1"),
    "rbac": ("v1alpha1", "v1beta1"),
    "scheduling": ("v1alpha1", "v1beta1"),
    "storage": ("v1beta1",),
}
NO_CONTROLLER = """
func startNone(_ ControllerContext) (http.Handler, bool, error) {
	return nil, false, nil
}
"""
NO_TUNNEL = """
func New(_, _ string, _ *url.URL, _ InstallSSHKey) Tunneler {
	panic("built without tunnels to nodes by SSH")
}
"""
# A newer kubectl prefers answers in Protobuf to answers in JSON.
ACCEPTED = "\t\t\taccepts := &accepted[i]\n"
UNLESS_PROTOBUF = """\
			if accepts.MediaType == runtime.ContentTypeProtobuf {
				continue
			}
"""
IMPORT = re.compile(r'^\t(?:(\w+) )?"([^"]+)"\n', re.MULTILINE)


def function(name: str) -> str:
    """Return a pattern for a top-level function and the comment above it."""
    return rf"^(//.*\n)*func {name}\((.*\n)+?}}\n"


def without_unused_imports(text: str) -> str:
    """Remove imports whose name nothing uses: Go refuses to compile them."""
    for line in IMPORT.finditer(text):
        alias, path = line.groups()
        name = alias or re.sub(r"/v\d+$", "", path).rpartition("/")[2]
        if name != "_" and not re.search(rf"\b{re.escape(name)}\.", text):
            text = text.replace(line[0], "", 1)
    return text


class Sources:
    """The folder of sources. An edit that finds nothing to change is an error."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def edit(
        self, name: str, *patterns: str, swap: Mapping[str, str] | None = None, tail: str = ""
    ) -> None:
        """Remove all matches of each pattern, replace each text of `swap`, and append `tail`."""
        file = self.root / name
        text = file.read_text()
        for pattern in patterns:
            text, count = re.subn(pattern, "", text, flags=re.MULTILINE)
            assert count, f"{name} has no match of {pattern!r}"
        for old, new in (swap or {}).items():
            assert old in text, f"{name} has no {old!r}"
            text = text.replace(old, new)
        file.write_text(without_unused_imports(text + tail))

    def remove(self, name: str) -> None:
        (self.root / name).unlink()


def prune_controllers(sources: Sources) -> None:
    starts = f"start({'|'.join(CONTROLLERS)})Controller"
    # They keep their names, which --controllers may list.
    none = {f" = start{name}Controller\n": " = startNone\n" for name in CONTROLLERS}
    sources.edit(f"{MANAGER}/controllermanager.go", swap=none, tail=NO_CONTROLLER)
    for name in ("apps", "batch"):
        sources.edit(f"{MANAGER}/{name}.go", function(starts))
    signers = r"(are\w+SignerFilesSpecified|anySpecificFilesSet|get\w+SignerFiles)"
    sources.edit(f"{MANAGER}/certificates.go", function(starts), function(signers))
    sources.edit(
        f"{MANAGER}/core.go",
        function(starts),
        function(r"(processCIDRs|[sg]etNodeCIDRMaskSizes(DualStack)?)"),
        swap={"garbagecollector.NewDebugHandler(garbageCollector)": "nil"},
    )
    for name in ("bootstrap", "discovery", "plugins", "plugins_providerless", "plugins_providers"):
        sources.remove(f"{MANAGER}/{name}.go")
    # It draws the graph of owners, with a library for linear algebra.
    sources.remove("pkg/controller/garbagecollector/dump.go")


def prune_api_server(sources: Sources) -> None:
    off = rf'^.*\b({"|".join(ADMISSION_OFF_BY_DEFAULT)})(\.|"$).*\n'
    sources.edit("pkg/kubeapiserver/options/plugins.go", off)
    login = r'^.*"k8s.io/client-go/plugin/pkg/client/auth"\n'
    sources.edit("pkg/kubeapiserver/authenticator/config.go", login)
    tunnels = r"^type SSHTunneler struct(.*\n)*"
    sources.edit("pkg/controlplane/tunneler/ssh.go", tunnels, tail=NO_TUNNEL)


def prune_informers(sources: Sources) -> None:
    room = "staging/src/k8s.io/client-go/informers"
    for group, versions in UNWATCHED.items():
        for version in versions:
            name = version.capitalize()
            getter = rf"^// {name} returns.*\nfunc.*\n.*\n}}\n"
            sources.edit(f"{room}/{group}/interface.go", getter, rf"^\t{name}\(\) .*\n")
            case = rf"^\tcase .*:\n.*f\.{group.capitalize()}\(\)\.{name}\(\).*\n"
            sources.edit(f"{room}/generic.go", case)


def prune_protobuf(sources: Sources) -> None:
    for room in ("api", "apiextensions-apiserver", "apiserver", "kube-aggregator", "metrics"):
        for file in (sources.root / "staging/src/k8s.io" / room).rglob("generated.pb.go"):
            file.unlink()
    as_json = {'"application/vnd.kubernetes.protobuf"': '"application/json"'}
    sources.edit("cmd/kube-apiserver/app/options/options.go", swap=as_json)
    sources.edit("cmd/kube-apiserver/app/server.go", swap=as_json)
    sources.edit("pkg/scheduler/apis/config/v1beta1/defaults.go", swap=as_json)
    sources.edit("staging/src/k8s.io/component-base/config/v1alpha1/defaults.go", swap=as_json)
    # Controllers of namespaces and owners ask for metadata by name of the encoding.
    metadata = {"application/vnd.kubernetes.protobuf": "application/json"}
    sources.edit("staging/src/k8s.io/client-go/metadata/metadata.go", swap=metadata)
    negotiation = "staging/src/k8s.io/apiserver/pkg/endpoints/handlers/negotiation/negotiate.go"
    sources.edit(negotiation, swap={ACCEPTED: ACCEPTED + UNLESS_PROTOBUF})
    # It compares rules by the text that Protobuf made of them.
    as_text = {"s[i].String(), s[j].String()": "fmt.Sprint(s[i]), fmt.Sprint(s[j])"}
    sources.edit("pkg/apis/rbac/v1/evaluation_helpers.go", swap=as_text)


if __name__ == "__main__":
    tree = Sources(Path(sys.argv[1]))
    prune_controllers(tree)
    prune_api_server(tree)
    prune_informers(tree)
    prune_protobuf(tree)
