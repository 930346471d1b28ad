//! `spile info`: what a disk is, layer by layer.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use spile_core::{Disk, DiskInfo, Result};
use spile_engine::CacheMode;
use spile_image::{LayerFacts, LayerInfo};

use super::{Exit, OpenArgs, on_engine, print_json, printable, say, text_of};
use crate::disks::{self, Source};
use crate::units::format_size;

/// Show what a disk is: format, sizes, chain, alignment
#[derive(Debug, Args)]
pub struct InfoArgs {
    /// The disk
    disk: PathBuf,
    #[command(flatten)]
    open: OpenArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Info {
    #[serde(serialize_with = "text_of")]
    path: PathBuf,
    format: String,
    virtual_size_bytes: u64,
    used_bytes: Option<u64>,
    request_align_bytes: u32,
    layers: Vec<Layer>,
}

#[derive(Debug, Serialize)]
struct Layer {
    #[serde(serialize_with = "text_of")]
    path: PathBuf,
    format: String,
    virtual_size_bytes: u64,
    file_bytes: u64,
    used_bytes: Option<u64>,
    needs_page_cache: bool,
    vhd: Option<Vhd>,
}

#[derive(Debug, Serialize)]
struct Vhd {
    subformat: &'static str,
    uuid: String,
    creator: String,
    creator_version: String,
    created_unix_s: u64,
    geometry: String,
    block_bytes: Option<u32>,
    allocated_blocks: Option<u64>,
    total_blocks: Option<u64>,
    parent_name: Option<String>,
    parent_uuid: Option<String>,
    journal: bool,
    unflushed: bool,
}

/// Runs `spile info`.
///
/// # Errors
/// When the disk cannot be opened.
pub fn run(args: &InfoArgs) -> Result<Exit> {
    let (source, options) = (Source::File(args.disk.clone()), args.open.read_only());
    let (disk, layers) = on_engine(move || async move {
        let chain = disks::open(CacheMode::Direct, &source, &options).await?;
        Ok((chain.info(), chain.layers()))
    })?;
    let info = Info::new(&disk, &layers);
    match args.json {
        true => print_json(&info)?,
        false => say(info.to_text().trim_end()),
    }
    Ok(Exit::Ok)
}

impl Info {
    fn new(disk: &DiskInfo, layers: &[LayerInfo]) -> Self {
        Self {
            path: layers[0].path.clone(),
            format: layers[0].format.to_string(),
            virtual_size_bytes: disk.size_bytes,
            used_bytes: disks::used_bytes(&layers[0].path),
            request_align_bytes: disk.request_align_bytes,
            layers: layers.iter().map(Layer::new).collect(),
        }
    }

    fn to_text(&self) -> String {
        let mut text = String::new();
        for (number, layer) in self.layers.iter().enumerate() {
            // Writing to a string cannot fail.
            let _ = layer.write(number, &mut text);
        }
        text
    }
}

impl Layer {
    fn new(layer: &LayerInfo) -> Self {
        Self {
            path: layer.path.clone(),
            format: layer.format.to_string(),
            virtual_size_bytes: layer.virtual_bytes,
            file_bytes: layer.file_bytes,
            used_bytes: disks::used_bytes(&layer.path),
            needs_page_cache: !layer.direct,
            vhd: layer.vhd.as_ref().map(|facts| Vhd::new(facts, layer.virtual_bytes)),
        }
    }

    fn write(&self, number: usize, text: &mut String) -> std::fmt::Result {
        match number {
            0 => writeln!(text, "disk:           {}", printable(&self.path.to_string_lossy()))?,
            n => writeln!(text, "\nparent {n}:       {}", printable(&self.path.to_string_lossy()))?,
        }
        let subformat = self.vhd.as_ref().map_or(String::new(), |vhd| format!(", {}", vhd.subformat));
        writeln!(text, "format:         {}{subformat}", self.format)?;
        let size = self.virtual_size_bytes;
        writeln!(text, "virtual size:   {} ({size} bytes)", format_size(size))?;
        writeln!(text, "file length:    {}", format_size(self.file_bytes))?;
        if let Some(used) = self.used_bytes {
            writeln!(text, "space used:     {}", format_size(used))?;
        }
        let access = match self.needs_page_cache {
            false => "direct",
            true => "through the page cache (the data are not aligned for direct I/O)",
        };
        writeln!(text, "data access:    {access}")?;
        self.vhd.as_ref().map_or(Ok(()), |vhd| vhd.write(text))
    }
}

impl Vhd {
    fn new(facts: &LayerFacts, virtual_bytes: u64) -> Self {
        use spile_image::vhd::codec::footer::DiskType;
        let (footer, header) = (&facts.footer, facts.header.as_ref());
        let differencing = footer.disk_type == DiskType::Differencing;
        let parent = header.filter(|_| differencing);
        let geometry = &footer.geometry;
        Self {
            subformat: match footer.disk_type {
                DiskType::Fixed => "fixed",
                DiskType::Dynamic => "dynamic",
                DiskType::Differencing => "differencing",
            },
            uuid: format_uuid(&footer.uuid),
            creator: format_creator(footer.creator),
            creator_version: format!("{}.{}", footer.creator_version >> 16, footer.creator_version & 0xffff),
            created_unix_s: u64::from(footer.timestamp) + SECONDS_1970_TO_2000,
            geometry: format!("{}/{}/{}", geometry.cylinders, geometry.heads, geometry.sectors),
            block_bytes: header.map(|header| header.block_size_bytes),
            allocated_blocks: header.map(|_| facts.allocated_blocks),
            total_blocks: header.map(|h| virtual_bytes.div_ceil(u64::from(h.block_size_bytes))),
            parent_name: parent.map(|header| header.parent_name.clone()),
            parent_uuid: parent.map(|header| format_uuid(&header.parent_uuid)),
            journal: facts.has_journal,
            unflushed: facts.unflushed,
        }
    }

    fn write(&self, text: &mut String) -> std::fmt::Result {
        if let (Some(block), Some(used), Some(total)) = (self.block_bytes, self.allocated_blocks, self.total_blocks) {
            let size = format_size(u64::from(block));
            writeln!(text, "blocks:         {used} of {total} allocated, {size} each")?;
        }
        writeln!(text, "creator:        {} {}", self.creator, self.creator_version)?;
        writeln!(text, "uuid:           {}", self.uuid)?;
        writeln!(text, "geometry:       {} (cylinders/heads/sectors)", self.geometry)?;
        if let (Some(name), Some(uuid)) = (&self.parent_name, &self.parent_uuid) {
            writeln!(text, "child of:       {} ({uuid})", printable(name))?;
        }
        let journal = match (self.journal, self.unflushed) {
            (false, _) => return Ok(()),
            (true, false) => "clean",
            (true, true) => "has records of an unclean end; the next open for writing takes them in",
        };
        writeln!(text, "journal:        {journal}")
    }
}

const SECONDS_1970_TO_2000: u64 = 946_684_800;

fn format_uuid(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// Four characters from a file: only those that are safe to print.
fn format_creator(creator: [u8; 4]) -> String {
    let shown = creator.iter().filter(|byte| byte.is_ascii_graphic());
    shown.map(|byte| char::from(*byte)).collect()
}
