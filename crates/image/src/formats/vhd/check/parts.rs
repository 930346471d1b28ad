//! The metadata that a check looks at, as they lie in the file.

use spile_core::{Result, Store};

use crate::formats::vhd::Layout;
use crate::formats::vhd::bat::Bat;
use crate::formats::vhd::codec::footer::DiskType;
use crate::formats::vhd::codec::header::Header;
use crate::formats::vhd::footers::{Footers, read_footers};
use crate::formats::vhd::open::{check_size, lay_out, load_bat, read_header};
use crate::formats::vhd::reparent::{find_spare, pair_of};

/// What a check reads.
pub(super) struct Parts {
    pub footers: Footers,
    /// `None` for a fixed disk.
    pub sparse: Option<SparseParts>,
}

/// The metadata of a dynamic or differencing image.
pub(super) struct SparseParts {
    pub header: Header,
    pub layout: Layout,
    pub bat: Bat,
    /// The content of the batmap, if its checksum is right.
    pub batmap: Option<Vec<u8>>,
    /// True when there is a batmap whose checksum is wrong.
    pub batmap_void: bool,
}

/// Reads footers, header, BAT and batmap. Does not check where the blocks lie.
pub(super) async fn read_parts<S: Store>(store: &S) -> Result<Parts> {
    let footers = read_footers(store).await?;
    check_size(&footers.footer, store.len_bytes())?;
    if footers.footer.disk_type == DiskType::Fixed {
        return Ok(Parts { footers, sparse: None });
    }
    let header = read_header(store, &footers.footer).await?;
    let (mut layout, batmap) = lay_out(store, &footers.footer, &header).await?;
    let bat = Bat::new(layout.blocks(), 0);
    let mut sectors = load_bat(store, &layout, &bat).await?;
    sectors.sort_unstable();
    let spare = find_spare(store, &footers.footer, &layout, &sectors).await?;
    layout.metadata.extend(spare.map(|place| pair_of(place.start)));
    let batmap_void = layout.batmap.is_some() && batmap.is_none();
    Ok(Parts { footers, sparse: Some(SparseParts { header, layout, bat, batmap, batmap_void }) })
}
