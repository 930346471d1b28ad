//! Finds the file of a parent by the names that its child has for it, if they may be followed.
//!
//! A path in an image is input from whoever wrote the image. It is followed only when what it leads to, with every
//! link and `..` resolved, lies inside the leaf's own folder (unless that is `/dev`) or one that the operator named.

use std::path::{Path, PathBuf};

use spile_core::{Error, ErrorKind, Files, Result};

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
        _ if found.is_empty() => Err(not_found(child, names)),
        _ => Ok(found),
    }
}

fn denied_error(child: &Path, path: &Path) -> Error {
    let folder = path.parent().unwrap_or(path).display().to_string();
    Error::new(
        ErrorKind::Denied,
        format!("the parent {} lies outside the folders that parents may lie in", path.display()),
    )
    .at_path(child)
    .hint(format!("if you trust the image, allow it with --allow-parents {folder}"))
}

fn not_found(child: &Path, names: &[PathBuf]) -> Error {
    Error::new(ErrorKind::NotFound, format!("the parent is not there; tried: {}", quoted(names)))
        .at_path(child)
        .hint("put the parent beside the child, or use --allow-parents DIR if it lies elsewhere")
}

/// `names` for a message: quoted and escaped, because they come from an image and go to a terminal.
pub(crate) fn quoted(names: &[PathBuf]) -> String {
    let names: Vec<_> = names.iter().map(|name| format!("{name:?}")).collect();
    names.join(", ")
}
