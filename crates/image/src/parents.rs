//! Finds the file of a parent by the names that its child has for it, if they may be followed.
//!
//! A path in an image is input from whoever wrote the image. It is followed only when what it leads to, with every
//! link and `..` resolved, lies inside the leaf's own folder (unless that is `/dev`) or one that the operator named.

use std::path::{Component, Path, PathBuf};

use spile_core::{Error, ErrorKind, Files, Result};

use crate::facts::LayerInfo;
use crate::graph::MAX_LAYERS;

/// Folders that parents may lie in.
pub(crate) struct Policy {
    roots: Vec<PathBuf>,
}

impl Policy {
    /// Allows the folder of `leaf` and the folders `allowed`. `leaf` is a canonical path, or `None` when the leaf is
    /// no file of this host. The folder of a device is not allowed, because every disk of the host lies in `/dev`.
    pub(crate) async fn new<F: Files>(files: &F, leaf: Option<&Path>, allowed: &[PathBuf]) -> Result<Self> {
        let folder = leaf.map(|leaf| leaf.parent().unwrap_or(Path::new("/")));
        let mut roots: Vec<_> =
            folder.filter(|folder| !folder.starts_with("/dev")).map(Path::to_owned).into_iter().collect();
        for folder in allowed {
            roots.push(files.canonical(folder).await?);
        }
        Ok(Self { roots })
    }

    /// Allows these folders, and `leaf`'s as [`Policy::new`] does. All paths are canonical.
    fn of(leaf: &Path, allowed: &[PathBuf]) -> Self {
        let own = (!leaf.starts_with("/dev")).then(|| leaf.to_owned());
        Self { roots: own.into_iter().chain(allowed.iter().cloned()).collect() }
    }

    fn allows(&self, path: &Path) -> bool {
        self.roots.iter().any(|root| path.starts_with(root))
    }
}

/// The canonical paths at which the parent of the image at `child` may lie. `names` are the names that the child has
/// for it; the answer keeps their order.
///
/// # Errors
/// `Denied` when the only files found lie outside the policy, `NotFound` when there is none.
pub(crate) async fn candidates<F: Files>(
    files: &F,
    child: &Path,
    names: &[PathBuf],
    policy: &Policy,
) -> Result<Vec<PathBuf>> {
    let folder = child.parent().unwrap_or(Path::new("/"));
    let (mut found, mut denied) = (Vec::new(), None);
    for name in names {
        let Ok(path) = files.canonical(&folder.join(name)).await else { continue };
        match policy.allows(&path) {
            true if !found.contains(&path) => found.push(path),
            true => {}
            false => denied = Some(path),
        }
    }
    match denied {
        Some(path) if found.is_empty() => Err(denied_error(child, &path)),
        _ if found.is_empty() => Err(not_found(child, folder, names)),
        _ => Ok(found),
    }
}

/// Checks that a new child in `folder`, on a chain with the layers `parents`, could be opened afterwards: by the rules for
/// parents, when the folders `allowed` are allowed then as well. All paths are canonical.
///
/// # Errors
/// `Unsupported` when the chain would be too long; `Denied` when a parent lies where none is followed to.
pub fn check_new_child(folder: &Path, parents: &[LayerInfo], allowed: &[PathBuf]) -> Result<()> {
    check_parents(folder, &parents.iter().map(|layer| layer.path.as_path()).collect::<Vec<_>>(), allowed)
}

/// [`check_new_child`] when only the paths of the layers are known.
///
/// # Errors
/// As there.
pub fn check_parents(folder: &Path, parents: &[&Path], allowed: &[PathBuf]) -> Result<()> {
    let parent = parents.first().copied().unwrap_or(folder);
    if parents.len() >= MAX_LAYERS {
        let what = format!("the parent's chain has {} layers, and no chain has more than {MAX_LAYERS}", parents.len());
        let hint =
            "copy the parent with all that is below it into one image by spile convert, and make a child of the copy";
        return Err(Error::new(ErrorKind::Unsupported, what).at_path(parent).hint(hint));
    }
    let policy = Policy::of(folder, allowed);
    let Some(outside) = parents.iter().find(|path| !policy.allows(path)) else {
        return Ok(());
    };
    let (outside, home) = (outside.display(), outside.parent().unwrap_or(Path::new("/")).display());
    let what = format!("{outside} lies outside the folder of the new child, {}", folder.display());
    Err(Error::new(ErrorKind::Denied, format!("{what}: no command would follow the child to it")).at_path(parent).hint(
        format!("put the child beside its parents; or say --allow-parents {home} now and whenever the child is opened"),
    ))
}

fn denied_error(child: &Path, path: &Path) -> Error {
    let folder = path.parent().unwrap_or(path).display().to_string();
    Error::new(
        ErrorKind::Denied,
        format!("the parent {} lies outside the folders that parents may lie in", path.display()),
    )
    .at_path(child)
    .hint(format!("if you trust the image, allow that folder with --allow-parents {folder}"))
}

fn not_found(child: &Path, folder: &Path, names: &[PathBuf]) -> Error {
    // An image may name one file by several names.
    let mut tried: Vec<PathBuf> = Vec::new();
    for path in names.iter().map(|name| plain(&folder.join(name))) {
        if !tried.contains(&path) {
            tried.push(path);
        }
    }
    let error = Error::new(ErrorKind::NotFound, format!("the parent is not there; tried: {}", quoted(&tried)));
    error.at_path(child).hint(
        "a parent is looked for only where its child says: put it there again, or a link to it (--allow-parents then \
         allows the folder that the link leads to); or tell the child its new place by spile rebase --trust",
    )
}

/// `path` without `.`, and without `..` that only leads back: as it reads, whatever links there are.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir if matches!(plain.components().next_back(), Some(Component::Normal(_))) => {
                plain.pop();
            }
            part => plain.push(part),
        }
    }
    plain
}

/// `names` for a message: quoted and escaped, because they come from an image and go to a terminal.
pub(crate) fn quoted(names: &[PathBuf]) -> String {
    let names: Vec<_> = names.iter().map(|name| format!("{name:?}")).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Facts;
    use crate::formats::Format;

    fn layer(path: &str) -> LayerInfo {
        LayerInfo {
            path: path.into(),
            format: Format::Vhd,
            virtual_bytes: 512,
            file_bytes: 512,
            direct: true,
            identity: None,
            which: None,
            unflushed: false,
            facts: Facts::default(),
        }
    }

    #[test]
    fn a_parent_that_is_missing_is_told_by_each_of_its_names_once() {
        let names = ["./p.vhd", "../vm/p.vhd", "/vm/p.vhd", "old/p.vhd", "p.vhd"].map(PathBuf::from);
        let error = not_found(Path::new("/vm/c.vhd"), Path::new("/vm"), &names);
        assert!(error.message().ends_with("tried: \"/vm/p.vhd\", \"/vm/old/p.vhd\""), "{error}");
    }

    #[test]
    fn a_chain_that_is_too_long_gets_no_child() {
        let chain = |layers: usize| (0..layers).map(|n| layer(&format!("/vm/{n}.vhd"))).collect::<Vec<_>>();
        check_new_child(Path::new("/vm"), &chain(MAX_LAYERS - 1), &[]).unwrap();
        let error = check_new_child(Path::new("/vm"), &chain(MAX_LAYERS), &[]).unwrap_err();
        assert_eq!((error.kind(), error.path()), (ErrorKind::Unsupported, Some(Path::new("/vm/0.vhd"))));
        assert!(error.to_string().contains("255") && error.hint_text().unwrap().contains("spile convert"), "{error}");
    }

    #[test]
    fn a_child_is_made_only_where_it_can_be_opened() {
        let chain = [layer("/vm/a.vhd"), layer("/base/b.vhd")];
        let check = |folder: &str, allowed: &[&str]| {
            let allowed: Vec<PathBuf> = allowed.iter().map(PathBuf::from).collect();
            check_new_child(Path::new(folder), &chain, &allowed)
        };
        for (folder, allowed) in [("/vm", &["/base"][..]), ("/", &[]), ("/x", &["/vm", "/base"])] {
            check(folder, allowed).unwrap();
        }
        for (folder, allowed, names) in [("/vm", &[][..], "/base"), ("/base", &[], "/vm"), ("/vm/x", &["/base"], "/vm")]
        {
            let error = check(folder, allowed).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Denied);
            assert!(error.hint_text().unwrap().contains(&format!("--allow-parents {names} ")), "{error}");
        }
        // As when it is opened: every disk of the host lies in /dev.
        let devices = [layer("/dev/vg/p")];
        assert!(check_new_child(Path::new("/dev/vg"), &devices, &[]).is_err());
    }
}
