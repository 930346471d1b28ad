//! `spile info`: what a disk is, and with `--chain` what its parents are.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{ArgGroup, Args};
use serde::Serialize;
use serde_json::{Map, Value as Json};
use spile_core::{Disk, Locator, Result};
use spile_engine::OsEnv;
use spile_image::facts::{Record, Value};
use spile_image::{LayerInfo, OpenOptions, describe};
use spile_store::{CacheMode, OsFiles};

use super::{Exit, OpenArgs, existing, on_engine, print_json, printable, say, text_of};
use crate::disks;
use crate::units::format_size;

/// Show what a disk is: format, sizes, alignment, and what it says of its parent
///
/// Only DISK itself is opened, so that an image from elsewhere can be looked at before it is trusted. With --chain, its
/// parents are opened and shown, too; then a parent that is missing or wrong is an error.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("parents").args(PARENT_OPTIONS).multiple(true).requires("chain")))]
pub struct InfoArgs {
    /// The disk: a file, a block device, or the URI of an NBD export
    disk: PathBuf,
    /// Open and show the parents, too
    #[arg(long, visible_alias = "backing-chain")]
    chain: bool,
    #[command(flatten)]
    open: OpenArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// The options that speak of files other than DISK.
const PARENT_OPTIONS: [&str; 3] = ["allow_parents", "backing_format", "allow_data_file"];

#[derive(Debug, Serialize)]
struct Info {
    #[serde(serialize_with = "text_of")]
    path: PathBuf,
    format: String,
    virtual_size_bytes: u64,
    used_bytes: Option<u64>,
    request_align_bytes: Option<u32>,
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
    needs_page_cache: Option<bool>,
    /// What only the format knows, under the format's name.
    #[serde(flatten)]
    facts: Map<String, Json>,
    #[serde(skip)]
    subformat: Option<&'static str>,
    #[serde(skip)]
    lines: Vec<(&'static str, String)>,
}

/// Runs `spile info`.
///
/// # Errors
/// When the disk cannot be opened.
pub fn run(args: &InfoArgs) -> Result<Exit> {
    let (source, options) = (existing(&args.disk)?, args.open.read_only());
    let info = match args.chain {
        true => on_engine(move || async move { chain_info(&source, &options).await }),
        false => on_engine(move || async move { image_info(&source, &options).await }),
    }?;
    match args.json {
        true => print_json(&info)?,
        false => say(info.to_text().trim_end()),
    }
    Ok(Exit::Ok)
}

/// What the image itself says. Nothing else is opened.
async fn image_info(source: &Locator, options: &OpenOptions) -> Result<Info> {
    let files = OsFiles::new(CacheMode::Direct).without_locks(options.no_lock);
    let image = describe(&files, Arc::new(OsEnv), source.clone(), options.format).await?;
    let align = image.request_align_bytes;
    let is_data_here = align.is_some();
    Ok(Info::new(align, vec![Layer::new(&image.layer, is_data_here)]))
}

/// What each image of the chain says.
async fn chain_info(source: &Locator, options: &OpenOptions) -> Result<Info> {
    let chain = disks::open(CacheMode::Direct, source, options).await?;
    let layers = chain.layers().iter().map(|layer| Layer::new(layer, true)).collect();
    Ok(Info::new(Some(chain.info().request_align_bytes), layers))
}

impl Info {
    fn new(request_align_bytes: Option<u32>, layers: Vec<Layer>) -> Self {
        let leaf = &layers[0];
        Self {
            path: leaf.path.clone(),
            format: leaf.format.clone(),
            virtual_size_bytes: leaf.virtual_size_bytes,
            used_bytes: leaf.used_bytes,
            request_align_bytes,
            layers,
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
    /// `knows_access`: the file that holds the data was opened.
    fn new(layer: &LayerInfo, knows_access: bool) -> Self {
        Self {
            path: layer.path.clone(),
            format: layer.format.to_string(),
            virtual_size_bytes: layer.virtual_bytes,
            file_bytes: layer.file_bytes,
            used_bytes: disks::used_bytes(&layer.path),
            needs_page_cache: knows_access.then_some(!layer.direct),
            facts: facts_of(layer),
            subformat: layer.facts.subformat,
            lines: layer.facts.lines.clone(),
        }
    }

    fn write(&self, number: usize, text: &mut String) -> std::fmt::Result {
        match number {
            0 => writeln!(text, "disk:           {}", printable(&self.path.to_string_lossy()))?,
            n => writeln!(text, "\nparent {n}:       {}", printable(&self.path.to_string_lossy()))?,
        }
        let subformat = self.subformat.map_or(String::new(), |subformat| format!(", {subformat}"));
        writeln!(text, "format:         {}{subformat}", self.format)?;
        let size = self.virtual_size_bytes;
        writeln!(text, "virtual size:   {} ({size} bytes)", format_size(size))?;
        writeln!(text, "file length:    {}", format_size(self.file_bytes))?;
        if let Some(used) = self.used_bytes {
            writeln!(text, "space used:     {}", format_size(used))?;
        }
        let access = match self.needs_page_cache {
            None => "not known: another file holds the data",
            Some(false) => "direct",
            Some(true) => "through the page cache (the data are not aligned for direct I/O)",
        };
        writeln!(text, "data access:    {access}")?;
        for (label, line) in &self.lines {
            writeln!(text, "{:<16}{}", format!("{label}:"), printable(line))?;
        }
        Ok(())
    }
}

/// A format's own facts, under its name; nothing where it has none.
fn facts_of(layer: &LayerInfo) -> Map<String, Json> {
    let values = &layer.facts.values;
    let named = (!values.is_empty()).then(|| (layer.format.to_string(), json_record(values)));
    named.into_iter().collect()
}

fn json_record(record: &Record) -> Json {
    record.iter().map(|(name, value)| ((*name).to_owned(), json_value(value))).collect::<Map<_, _>>().into()
}

fn json_value(value: &Value) -> Json {
    match value {
        Value::None => Json::Null,
        Value::Bool(value) => (*value).into(),
        Value::Number(value) => (*value).into(),
        Value::Text(value) => value.as_str().into(),
        Value::List(records) => records.iter().map(json_record).collect(),
    }
}
