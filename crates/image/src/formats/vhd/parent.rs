//! What a differencing VHD says of its parent.

use std::path::PathBuf;

use spile_core::{Error, ErrorKind, Result, Segments, Store, StoreOffset, Via};

use super::Sparse;
use super::codec::header::Header;
use super::codec::locator::{Locator, Platform};
use crate::formats::Format;
use crate::layer::{Identity, ParentRef};

/// The longest locator that is read, in bytes.
const MAX_LOCATOR_BYTES: u32 = 4096;

/// The parent UUID of a child whose parent is raw: blktap's convention, as a raw image has no UUID.
const RAW_PARENT: [u8; 16] = [0; 16];

impl<S: Store> Sparse<S> {
    /// The parent of a differencing image.
    pub(super) async fn parent(&self) -> Result<ParentRef> {
        parent_ref(&self.store, &self.head().header).await
    }
}

/// The parent of the differencing image in `store` with this header.
pub(super) async fn parent_ref<S: Store>(store: &S, header: &Header) -> Result<ParentRef> {
    let uuid = header.parent_uuid;
    let names = parent_names(store, header).await?;
    let format = parent_format(&uuid);
    if format == Format::Raw {
        refuse_marked(&names)?;
        return Ok(ParentRef { names, format: Some(Format::Raw), identity: None });
    }
    Ok(ParentRef { names, format: Some(format), identity: Some(Identity(uuid)) })
}

/// What the locators say, relative paths first, and the header's own name last.
async fn parent_names<S: Store>(store: &S, header: &Header) -> Result<Vec<PathBuf>> {
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

/// The format that the parent UUID of a child says.
pub(super) fn parent_format(uuid: &[u8; 16]) -> Format {
    match uuid {
        &RAW_PARENT => Format::Raw,
        uuid => Format::marked(Identity(*uuid)).unwrap_or(Format::Vhd),
    }
}

/// A child that says "raw" of a file whose name says otherwise would show the guest that file's metadata. It is refused
/// where a format's images are named by their own identities, and never by the null UUID.
fn refuse_marked(names: &[PathBuf]) -> Result<()> {
    let marked = |name: &PathBuf| Format::from_extension(name).filter(|format| format.about().identity_mark.is_some());
    match names.iter().find_map(marked) {
        None => Ok(()),
        Some(format) => {
            let what = format!("the child says that its parent is raw, but the parent's name says {format}");
            Err(Error::new(ErrorKind::Corrupt, what).hint("create the child anew, and name the parent's format"))
        }
    }
}

/// The parent UUID that a child of such a parent gets.
pub(super) fn uuid_for(parent: Option<Identity>) -> [u8; 16] {
    parent.map_or(RAW_PARENT, |identity| identity.0)
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
