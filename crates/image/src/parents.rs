//! Finding a parent: what its child says of it, and whether that may be followed.
//!
//! A path in an image is input from whoever wrote the image. It is followed only when what it leads to, with every
//! link and `..` resolved, lies inside the leaf's own folder (unless that is `/dev`) or one that the operator named.

use std::path::{Path, PathBuf};

use spile_core::{Error, ErrorKind, Files, Result, Segments, Store, StoreOffset, Via};

use crate::vhd::codec::header::Header;
use crate::vhd::codec::locator::{Locator, Platform};

/// The longest locator that is read, in bytes.
const MAX_LOCATOR_BYTES: u32 = 4096;

/// Folders that parents may lie in.
pub(crate) struct Policy {
    roots: Vec<PathBuf>,
}

impl Policy {
    /// The folder of `leaf` (a canonical path) and `allowed`. Not of a device: every disk of the host lies in `/dev`.
    pub(crate) fn new<F: Files>(files: &F, leaf: &Path, allowed: &[PathBuf]) -> Result<Self> {
        let folder = leaf.parent().unwrap_or(Path::new("/"));
        let mut roots = if folder.starts_with("/dev") { Vec::new() } else { vec![folder.to_owned()] };
        for folder in allowed {
            roots.push(files.canonical(folder)?);
        }
        Ok(Self { roots })
    }

    fn allows(&self, path: &Path) -> bool {
        self.roots.iter().any(|root| path.starts_with(root))
    }
}

/// The canonical paths at which `child`'s parent may lie, best first: relative locators, absolute ones, the bare
/// name in the child's folder.
///
/// # Errors
/// `Denied` when the only files found lie outside the policy, `NotFound` when there is none, `Corrupt` when a
/// locator makes no sense.
pub(crate) async fn candidates<F: Files>(
    files: &F,
    child: &F::Store,
    header: &Header,
    policy: &Policy,
) -> Result<Vec<PathBuf>> {
    let names = names(child, header).await?;
    let folder = child.path().parent().unwrap_or(Path::new("/"));
    let (mut found, mut denied) = (Vec::new(), None);
    for name in &names {
        let Ok(path) = files.canonical(&folder.join(name)) else { continue };
        match policy.allows(&path) {
            true if !found.contains(&path) => found.push(path),
            true => {}
            false => denied = Some(path),
        }
    }
    match denied {
        Some(path) if found.is_empty() => Err(denied_error(child.path(), &path)),
        _ if found.is_empty() => Err(not_found(child.path(), &names)),
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
    // Quoted and escaped: the names are the image's, and go to a terminal.
    let names: Vec<_> = names.iter().map(|name| format!("{name:?}")).collect();
    Error::new(ErrorKind::NotFound, format!("the parent is not there; tried: {}", names.join(", ")))
        .at_path(child)
        .hint("put the parent beside the child, or use --allow-parents DIR if it lies elsewhere")
}

/// What the locators say, relative ones first, and the header's own name last.
async fn names<S: Store>(store: &S, header: &Header) -> Result<Vec<PathBuf>> {
    let mut names: Vec<PathBuf> = Vec::new();
    for locator in &header.locators {
        if matches!(locator.platform, Platform::W2ru | Platform::W2ku | Platform::MacX) {
            names.push(PathBuf::from(read_locator(store, locator).await?));
        }
    }
    names.sort_by_key(|name| name.is_absolute());
    let bare = header.parent_name.rsplit(['/', '\\']).next().unwrap_or_default();
    if !bare.is_empty() && !bare.contains('\0') {
        names.push(PathBuf::from(bare));
    }
    names.dedup();
    Ok(names)
}

async fn read_locator<S: Store>(store: &S, locator: &Locator) -> Result<String> {
    let misplaced =
        |why: &str| Error::new(ErrorKind::Corrupt, why).at_path(store.path()).at_offset(locator.offset_bytes);
    if locator.len_bytes > MAX_LOCATOR_BYTES {
        return Err(misplaced("a parent locator is longer than 4096 bytes"));
    }
    let end = locator.offset_bytes.checked_add(u64::from(locator.len_bytes));
    if end.is_none_or(|end| end > store.len_bytes()) {
        return Err(misplaced("a parent locator goes past the end of the file"));
    }
    let bytes = Segments::zeroed(locator.len_bytes as usize);
    store.read_at(StoreOffset(locator.offset_bytes), &bytes, Via::Cached).await?;
    locator
        .decode(&bytes.to_vec())
        .map_err(|error| Error::from(error).at_path(store.path()).at_offset(locator.offset_bytes))
}
