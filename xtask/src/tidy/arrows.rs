//! Which crate may import which: the arrows of the design, checked against the manifests.
//!
//! Cargo refuses a path to a crate that the manifest does not name, so the manifests are all
//! there is to check.

use super::Finding;
use crate::{Result, shell};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// For each crate: its name, the crates that it may import, and further crates that its tests may import.
const ARROWS: &[(&str, &[&str], &[&str])] = &[
    ("spile-mem", &[], &[]),
    ("spile-core", &["spile-mem"], &[]),
    ("spile-engine", &["spile-core", "spile-mem"], &["spile-store"]),
    ("spile-nbd-wire", &[], &[]),
    ("spile-nbd-tls", &["spile-core", "spile-engine"], &[]),
    ("spile-store", &["spile-core", "spile-mem", "spile-engine", "spile-nbd-wire", "spile-nbd-tls"], &[]),
    ("spile-image", &["spile-core"], &["spile-mem", "spile-engine", "spile-node", "spile-store", "spile-sim"]),
    ("spile-node", &["spile-core", "spile-image"], &["spile-mem", "spile-engine", "spile-store"]),
    (
        "spile-life",
        &["spile-core", "spile-image", "spile-node"],
        &["spile-mem", "spile-engine", "spile-store", "spile-sim"],
    ),
    ("spile-front", &["spile-core", "spile-engine"], &[]),
    (
        "spile-front-nbd",
        &["spile-core", "spile-mem", "spile-engine", "spile-nbd-wire", "spile-nbd-tls", "spile-front"],
        &["spile-store"],
    ),
    ("spile-front-vhost", &["spile-core", "spile-mem", "spile-engine", "spile-front"], &["spile-lab", "spile-store"]),
    ("spile-xen", &["spile-core", "spile-mem"], &[]),
    (
        "spile-front-blkif",
        &["spile-core", "spile-mem", "spile-engine", "spile-front", "spile-xen"],
        &["spile-lab", "spile-store"],
    ),
    ("spile-lab", &["spile-core", "spile-mem", "spile-xen"], &[]),
    ("spile-sim", &["spile-core", "spile-image", "spile-node", "spile-life"], &["spile-mem"]),
    (
        "spile-server",
        &[
            "spile-core",
            "spile-mem",
            "spile-engine",
            "spile-nbd-wire",
            "spile-store",
            "spile-image",
            "spile-node",
            "spile-life",
            "spile-xen",
            "spile-front",
            "spile-front-nbd",
            "spile-front-vhost",
            "spile-front-blkif",
        ],
        &[],
    ),
    (
        "spile-bench",
        &[
            "spile-core",
            "spile-engine",
            "spile-store",
            "spile-image",
            "spile-node",
            "spile-front-nbd",
            "spile-front-vhost",
            "spile-front-blkif",
            "spile-xen",
            "spile-lab",
            "spile-server",
        ],
        &[],
    ),
    ("spile", &ALL, &ALL),
    ("xtask", &[], &[]),
];

const ALL: [&str; 18] = [
    "spile-nbd-tls",
    "spile-nbd-wire",
    "spile-mem",
    "spile-core",
    "spile-engine",
    "spile-store",
    "spile-image",
    "spile-node",
    "spile-life",
    "spile-front",
    "spile-front-nbd",
    "spile-front-vhost",
    "spile-front-blkif",
    "spile-xen",
    "spile-lab",
    "spile-sim",
    "spile-server",
    "spile-bench",
];

/// What cargo knows of the workspace.
pub struct Metadata {
    packages: Vec<Package>,
}

struct Package {
    name: String,
    manifest: PathBuf,
    /// Name and whether only tests use it.
    imports: Vec<(String, bool)>,
    /// Root file and whether it is the crate's own (a library, a program) rather than a test.
    targets: Vec<(PathBuf, bool)>,
}

impl Metadata {
    /// The root files of every target, relative to the top folder.
    pub fn roots(&self) -> Vec<PathBuf> {
        let targets = self.packages.iter().flat_map(|package| &package.targets);
        targets.map(|(path, _)| path.clone()).collect()
    }

    /// Is `path` the root of a library or a program?
    pub fn is_crate_root(&self, path: &Path) -> bool {
        let mut targets = self.packages.iter().flat_map(|package| &package.targets);
        targets.any(|(root, own)| *own && root == path)
    }

    /// The names of all crates.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.packages.iter().map(|package| package.name.as_str())
    }

    /// The name of the crate whose folder holds a file; `None` for a file of no crate. Paths are relative to the top folder.
    pub fn owner(&self, path: &Path) -> Option<&str> {
        let holds = |package: &&Package| package.manifest.parent().is_some_and(|folder| path.starts_with(folder));
        self.packages.iter().find(holds).map(|package| package.name.as_str())
    }

    /// The crates named, and all that import one of them, directly or not, for their tests too.
    pub fn dependents<'a>(&self, named: impl Iterator<Item = &'a str>) -> BTreeSet<String> {
        let mut found: BTreeSet<String> = named.map(str::to_owned).collect();
        loop {
            let before = found.len();
            for package in &self.packages {
                if package.imports.iter().any(|(name, _)| found.contains(name)) {
                    found.insert(package.name.clone());
                }
            }
            if found.len() == before {
                return found;
            }
        }
    }
}

/// Reads the workspace's metadata from cargo.
pub fn metadata() -> Result<Metadata> {
    let mut command = shell::cargo();
    command.args(["metadata", "--format-version", "1", "--no-deps", "--offline"]);
    parse(&shell::output(&mut command)?, &shell::root())
}

fn parse(json: &str, root: &Path) -> Result<Metadata> {
    let value: Value = serde_json::from_str(json).map_err(|error| format!("metadata: {error}"))?;
    let packages = list(&value["packages"]).map(|package| parse_package(package, root));
    Ok(Metadata { packages: packages.collect() })
}

fn parse_package(value: &Value, root: &Path) -> Package {
    let relative = |path: &Value| {
        let path = Path::new(path.as_str().unwrap_or_default());
        path.strip_prefix(root).unwrap_or(path).to_path_buf()
    };
    let imports = list(&value["dependencies"])
        .map(|import| (text(&import["name"]), import["kind"].as_str() == Some("dev")))
        .collect();
    let targets = list(&value["targets"])
        .map(|target| {
            let own = list(&target["kind"]).any(|kind| matches!(kind.as_str(), Some("lib" | "bin")));
            (relative(&target["src_path"]), own)
        })
        .collect();
    let manifest = relative(&value["manifest_path"]);
    Package { name: text(&value["name"]), manifest, imports, targets }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_string()
}

/// Every import of one of our crates follows an arrow.
pub fn check(metadata: &Metadata) -> Vec<Finding> {
    let ours: Vec<&str> = metadata.packages.iter().map(|package| package.name.as_str()).collect();
    metadata.packages.iter().flat_map(|package| check_package(package, &ours)).collect()
}

fn check_package(package: &Package, ours: &[&str]) -> Vec<Finding> {
    let Some((_, normal, tests)) = ARROWS.iter().find(|arrow| arrow.0 == package.name) else {
        let message = format!("{} has no entry in the arrows of xtask", package.name);
        return vec![Finding::new(&package.manifest, 0, message)];
    };
    let imports = package.imports.iter().filter(|(name, _)| ours.contains(&name.as_str()));
    imports
        .filter(|(name, dev)| {
            let name = name.as_str();
            !(normal.contains(&name) || *dev && tests.contains(&name))
        })
        .map(|(name, dev)| {
            let kind = if *dev { "its tests may not import" } else { "may not import" };
            Finding::new(&package.manifest, 0, format!("{} {kind} {name}", package.name))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_import(name: &str, import: &str, kind: &str) -> Metadata {
        let json = format!(
            r#"{{"packages":[
                {{"name":"{name}","manifest_path":"/top/crates/x/Cargo.toml",
                  "dependencies":[{{"name":"{import}","kind":{kind}}},{{"name":"serde","kind":null}}],
                  "targets":[{{"kind":["lib"],"src_path":"/top/crates/x/src/lib.rs"}}]}},
                {{"name":"spile-image","manifest_path":"/top/crates/image/Cargo.toml",
                  "dependencies":[],"targets":[]}},
                {{"name":"spile-sim","manifest_path":"/top/crates/sim/Cargo.toml",
                  "dependencies":[],"targets":[]}}]}}"#
        );
        parse(&json, Path::new("/top")).expect("the sample is JSON")
    }

    #[test]
    fn an_import_against_the_arrows_is_found() {
        let findings = check(&with_import("spile-front-nbd", "spile-image", "null"));
        assert_eq!(findings.len(), 1);
        assert!(findings[0].message.contains("may not import spile-image"));
    }

    #[test]
    fn tests_may_import_only_what_is_named_for_tests() {
        assert!(check(&with_import("spile-image", "spile-sim", "\"dev\"")).is_empty());
        assert_eq!(check(&with_import("spile-image", "spile-sim", "null")).len(), 1);
        assert_eq!(check(&with_import("spile-engine", "spile-image", "\"dev\"")).len(), 1);
    }

    #[test]
    fn a_crate_without_arrows_is_found() {
        assert_eq!(check(&with_import("spile-new", "serde", "null")).len(), 1);
    }

    #[test]
    fn a_change_concerns_the_crates_that_import_it() {
        let metadata = with_import("spile-node", "spile-image", "null");
        let owner = metadata.owner(Path::new("crates/x/src/deep/file.rs"));
        assert_eq!(owner, Some("spile-node"));
        assert_eq!(metadata.owner(Path::new("docs/x.md")), None);
        let concerned = |name| metadata.dependents([name].into_iter()).into_iter().collect::<Vec<_>>();
        assert_eq!(concerned("spile-image"), ["spile-image", "spile-node"]);
        assert_eq!(concerned("spile-node"), ["spile-node"]);
    }

    #[test]
    fn roots_are_relative_to_the_top() {
        let metadata = with_import("spile-mem", "serde", "null");
        assert!(metadata.is_crate_root(Path::new("crates/x/src/lib.rs")));
        assert_eq!(metadata.roots(), [PathBuf::from("crates/x/src/lib.rs")]);
    }
}
