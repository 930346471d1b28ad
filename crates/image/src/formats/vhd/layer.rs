//! A VHD as a graph sees it.

use std::sync::Arc;

use spile_core::{Extent, Result, Store, StoreOffset, Timer, Via};

use super::codec::footer::Footer;
use super::create::VhdParent;
use super::grow::grow_fixed_in_use;
use super::lazy::PAGE_PIECE;
use super::resize::{grow_fixed, resized};
use super::shrink::shrink_fixed;
use super::write::{BlockPart, SparseReserved};
use super::{SECTOR, Sparse};
use crate::create::NewParent;
use crate::facts::Facts;
use crate::formats::raw::Raw;
use crate::grace::Reader;
use crate::layer::{Found, GivenBack, Identity, Layer, MapPiece, ParentRef};
use crate::room::HearRoom;

/// A sealed image's bitmaps are needed only until they are in the merged map of a graph's parents.
const SEALED_CACHE_BYTES: usize = 1 << 20;

/// An opened VHD of any type.
pub enum Vhd<S> {
    /// A fixed image: the data as in a raw image, and a footer behind them.
    Fixed(Footer, Raw<S>),
    /// A dynamic or differencing image.
    Sparse(Arc<Sparse<S>>),
}

impl<S: Store> Sparse<S> {
    /// Converts `part`, which the graph has cut to one block, into a part of that block.
    fn block_part(&self, part: Extent) -> BlockPart {
        self.part(part.start(), part.end())
    }
}

impl<S: Store> Layer<S> for Vhd<S> {
    type Reserved<'a>
        = SparseReserved<'a, S>
    where
        S: 'a;

    fn store(&self) -> &S {
        match self {
            Self::Fixed(_, raw) => raw.store(),
            Self::Sparse(sparse) => &sparse.store,
        }
    }

    fn size_bytes(&self) -> u64 {
        match self {
            Self::Fixed(_, raw) => raw.size_bytes(),
            Self::Sparse(sparse) => sparse.size_bytes(),
        }
    }

    fn via(&self) -> Via {
        match self {
            Self::Fixed(_, raw) => raw.via(),
            Self::Sparse(sparse) => sparse.via,
        }
    }

    fn request_align_bytes(&self) -> u32 {
        match self {
            Self::Fixed(_, raw) => raw.request_align_bytes(),
            Self::Sparse(_) => SECTOR as u32,
        }
    }

    fn find(&self, at: u64, len_bytes: u64) -> (Found, u64) {
        match self {
            Self::Fixed(_, raw) => raw.find(at, len_bytes),
            Self::Sparse(sparse) => sparse.find(at, len_bytes),
        }
    }

    /// Answers without the bitmap: the place of the block is enough.
    fn locate(&self, at: u64, len_bytes: u64) -> (Found, u64) {
        match self {
            Self::Fixed(_, raw) => raw.find(at, len_bytes),
            Self::Sparse(sparse) => sparse.locate(at, len_bytes),
        }
    }

    async fn load(&self, MapPiece(block): MapPiece) -> Result<()> {
        match self {
            Self::Fixed(..) => Ok(()),
            Self::Sparse(sparse) if block >= PAGE_PIECE => sparse.load_page((block - PAGE_PIECE) as u32).await,
            Self::Sparse(sparse) => sparse.load_bits(block as u32).await,
        }
    }

    fn enter(&self) -> Option<Reader<'_>> {
        match self {
            Self::Sparse(sparse) if !sparse.is_read_only() => Some(sparse.grace.enter()),
            _ => None,
        }
    }

    fn part_len(&self, extent: Extent) -> u64 {
        match self {
            Self::Fixed(..) => extent.len_bytes,
            Self::Sparse(sparse) => sparse.block_part(extent).len_bytes(),
        }
    }

    fn unit(&self, part: Extent) -> Extent {
        match self {
            Self::Fixed(..) => part,
            Self::Sparse(sparse) => sparse.block_extent(sparse.block_part(part).block),
        }
    }

    fn next_held(&self, extent: Extent) -> Option<Extent> {
        match self {
            Self::Fixed(_, raw) => raw.next_held(extent),
            Self::Sparse(sparse) => sparse.next_held(extent),
        }
    }

    fn in_place(&self, extent: Extent) -> Option<StoreOffset> {
        match self {
            Self::Fixed(_, raw) => raw.in_place(extent),
            Self::Sparse(_) => None,
        }
    }

    async fn reserve(&self, part: Extent) -> Result<SparseReserved<'_, S>> {
        match self {
            Self::Fixed(..) => Err(self.unsupported("a fixed VHD is written in place")),
            Self::Sparse(sparse) => sparse.reserve_part(sparse.block_part(part)).await,
        }
    }

    async fn zero(&self, part: Extent, may_unmap: bool, below_is_zero: bool) -> Result<bool> {
        match self {
            Self::Fixed(_, raw) => raw.zero(part, may_unmap, below_is_zero).await,
            Self::Sparse(sparse) => {
                sparse.zero_part(&sparse.block_part(part), may_unmap, below_is_zero).await.map(|()| true)
            }
        }
    }

    async fn unmap(&self, part: Extent, below_is_zero: bool) -> Result<()> {
        match self {
            Self::Fixed(_, raw) => raw.unmap(part, below_is_zero).await,
            Self::Sparse(sparse) => sparse.discard_part(&sparse.block_part(part), below_is_zero).await,
        }
    }

    async fn forget(&self, part: Extent) -> Result<()> {
        match self {
            Self::Fixed(..) => Err(self.unsupported("a fixed VHD has no parent that it could show instead")),
            Self::Sparse(sparse) => sparse.forget_part(&sparse.block_part(part)).await,
        }
    }

    fn hold_space(&self, holds: bool) {
        if let Self::Sparse(sparse) = self {
            sparse.alloc.hold_space(holds);
        }
    }

    async fn give_back(&self, most_bytes: u64, timer: &dyn Timer) -> Result<GivenBack> {
        match self {
            Self::Fixed(..) => Ok(GivenBack::default()),
            Self::Sparse(sparse) => sparse.give_back(most_bytes, timer).await,
        }
    }

    async fn own_zeroes(&self, part: Extent) -> Result<()> {
        match self {
            Self::Fixed(..) => Ok(()),
            Self::Sparse(sparse) => sparse.own_zeroes(&sparse.block_part(part)).await,
        }
    }

    async fn set_parent(&self, parent: Option<&NewParent>) -> Result<()> {
        match self {
            Self::Fixed(..) if parent.is_none() => Ok(()),
            Self::Fixed(..) => Err(self.unsupported("a fixed VHD cannot have a parent")),
            Self::Sparse(sparse) => sparse.set_parent(parent).await,
        }
    }

    fn begin(&self) {
        if let Self::Sparse(sparse) = self {
            sparse.prepare_beside();
        }
    }

    async fn flush(&self) -> Result<()> {
        match self {
            Self::Fixed(_, raw) => raw.flush().await,
            Self::Sparse(sparse) => sparse.flush().await,
        }
    }

    async fn rest(&self) {
        if let Self::Sparse(sparse) = self {
            sparse.beside.wait_for_none().await;
        }
    }

    async fn seal(&self) -> Result<()> {
        match self {
            Self::Fixed(_, raw) => raw.seal().await,
            Self::Sparse(sparse) => {
                sparse.seal().await?;
                sparse.bits.shrink(SEALED_CACHE_BYTES, sparse.layout.bitmap_bytes as usize);
                Ok(())
            }
        }
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        match self {
            Self::Fixed(footer, raw) => grow_fixed_in_use(footer, raw, size_bytes).await,
            Self::Sparse(sparse) => sparse.grow_in_use(size_bytes).await,
        }
    }

    async fn resize_unused(&self, size_bytes: u64) -> Result<()> {
        match self {
            Self::Fixed(footer, raw) if size_bytes < raw.size_bytes() => shrink_fixed(footer, raw, size_bytes).await,
            Self::Fixed(footer, raw) => grow_fixed(footer, raw, size_bytes).await,
            Self::Sparse(sparse) if size_bytes < sparse.size_bytes() => sparse.shrink(size_bytes).await,
            Self::Sparse(sparse) => sparse.grow(size_bytes).await,
        }
    }

    fn check_name(&self, parent: &NewParent) -> Result<()> {
        VhdParent::from_new(parent).check()
    }

    async fn parent(&self) -> Result<Option<ParentRef>> {
        match self {
            Self::Sparse(sparse) if sparse.is_differencing() => sparse.parent().await.map(Some),
            _ => Ok(None),
        }
    }

    fn identity(&self) -> Option<Identity> {
        let uuid = match self {
            Self::Fixed(footer, _) => footer.uuid,
            Self::Sparse(sparse) => sparse.head().footer.uuid,
        };
        Some(Identity(uuid))
    }

    fn allocations(&self) -> u64 {
        match self {
            Self::Fixed(..) => 0,
            Self::Sparse(sparse) => sparse.alloc.given_out(),
        }
    }

    fn watch_room(&self, hear: HearRoom) -> bool {
        match self {
            Self::Sparse(sparse) if !sparse.is_read_only() && !sparse.store.info().grows_zeroed => {
                sparse.room.set(hear);
                true
            }
            _ => false,
        }
    }

    async fn look_for_room(&self) -> Result<()> {
        match self {
            Self::Fixed(..) => Ok(()),
            Self::Sparse(sparse) => sparse.look_for_more().await,
        }
    }

    fn is_unflushed(&self) -> bool {
        matches!(self, Self::Sparse(sparse) if sparse.journal.has_pending())
    }

    fn facts(&self) -> Facts {
        match self {
            Self::Fixed(footer, raw) if raw.size_bytes() == footer.current_size_bytes => super::facts::of(footer, None),
            Self::Fixed(footer, raw) => super::facts::of(&resized(footer, raw.size_bytes()), None),
            Self::Sparse(sparse) => {
                let head = sparse.head();
                super::facts::of(&head.footer, Some(sparse.sparse_facts(&head)))
            }
        }
    }
}
