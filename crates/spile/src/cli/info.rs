//! `spile info`: what a disk is, layer by layer.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use serde_json::{Map, Value as Json};
use spile_core::{Disk, DiskInfo, Result};
use spile_image::LayerInfo;
use spile_image::facts::{Record, Value};
use spile_store::CacheMode;

use super::{Exit, OpenArgs, on_engine, print_json, printable, say, text_of};
use crate::disks;
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
    let (source, options) = (disks::locate(&args.disk)?, args.open.read_only());
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
            false => "direct",
            true => "through the page cache (the data are not aligned for direct I/O)",
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
