//! The JSON bodies that tell what a disk's images say of themselves, and where their bytes lie. `spile info` and `spile map` print the same
//! ones, whether they read the images themselves or ask the server that has them open.

use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use spile_core::{ExtentKind, Store};
use spile_image::facts::{Record, Value};
use spile_image::layer::Layer as _;
use spile_image::{GraphLayer, LayerInfo, PlacedRun};
use utoipa::ToSchema;
use utoipa::openapi::schema::{AdditionalProperties, AnyOf, ArrayBuilder, ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};

/// What a disk is.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Info {
    /// Where its bytes are: the path of the leaf, or the URI of an export.
    pub path: String,
    /// The leaf's format.
    pub format: String,
    /// The size that guests see, in bytes.
    pub virtual_size_bytes: u64,
    /// The space that the leaf's file takes on its file system, in bytes. `null` when that is not known: a server does not ask.
    pub used_bytes: Option<u64>,
    /// The unit of offsets and lengths of requests, in bytes. `null` when the data lie in another file, which was not opened.
    pub request_align_bytes: Option<u32>,
    /// The images that were looked at, the leaf first.
    pub layers: Vec<Image>,
    /// The server that says so; `null` when the images were read directly.
    pub served_by: Option<ServedBy>,
}

/// The server that has a disk open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ServedBy {
    /// The disk's name on the server.
    pub disk: String,
    /// The server's control socket.
    pub server: String,
    /// The server's process.
    pub pid: u32,
}

/// What an image says of itself.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Image {
    /// The file.
    pub path: String,
    /// Its format.
    pub format: String,
    /// Which kind of the format it is, where there are several.
    pub subformat: Option<String>,
    /// The size of the disk that it describes, in bytes.
    pub virtual_size_bytes: u64,
    /// The length of the file, in bytes.
    pub file_bytes: u64,
    /// The space that the file takes on its file system, in bytes. `null` when that is not known: a server does not ask.
    pub used_bytes: Option<u64>,
    /// True when its data are not aligned for direct I/O. `null` when they lie in another file, which was not opened.
    pub needs_page_cache: Option<bool>,
    /// What only the format knows, by name. The names say the units.
    #[schema(schema_with = facts_schema)]
    pub facts: Map<String, Json>,
    /// The same in lines for people. `spile info --json` leaves it out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lines: Vec<Line>,
}

/// A line for people.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Line {
    /// What it is about.
    pub label: String,
    /// What there is to say.
    pub text: String,
}

/// Part of a disk's map.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct MapPart {
    /// Runs in their order, without gaps. Two that touch may be alike.
    pub runs: Vec<Run>,
    /// Where the next part begins; `null` at the disk's end.
    pub next_offset_bytes: Option<u64>,
    /// The layers that `depth` counts.
    pub layers: Vec<MapLayer>,
    /// The server that says so.
    pub served_by: ServedBy,
}

/// A part of a disk whose bytes lie in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Run {
    /// Where it begins on the disk.
    pub offset_bytes: u64,
    /// How long it is.
    pub len_bytes: u64,
    /// What the run is: data, zeroes or a hole.
    pub kind: RunKind,
    /// The layer that decides: 0 is the disk itself, 1 its parent, and so on. `null` for a hole.
    pub depth: Option<u16>,
    /// Where the bytes lie in the file of the layer `depth`; `null` when there are none, or compressed ones.
    pub file_offset_bytes: Option<u64>,
}

/// What a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RunKind {
    /// Allocated.
    Data,
    /// Allocated, and reads as zeroes.
    Zero,
    /// Not allocated anywhere; reads as zeroes.
    Hole,
}

/// An image by its depth in a map.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct MapLayer {
    /// 0 is the disk itself, 1 its parent, and so on.
    pub depth: usize,
    /// The file.
    pub path: String,
}

impl Info {
    /// The disk of these images, the leaf first; there is at least one.
    pub fn new(request_align_bytes: Option<u32>, layers: Vec<Image>, served_by: Option<ServedBy>) -> Self {
        let leaf = &layers[0];
        Self {
            path: leaf.path.clone(),
            format: leaf.format.clone(),
            virtual_size_bytes: leaf.virtual_size_bytes,
            used_bytes: leaf.used_bytes,
            request_align_bytes,
            layers,
            served_by,
        }
    }
}

impl Image {
    /// What `layer` says. `knows_access`: the file that holds the data was opened.
    pub fn new(layer: &LayerInfo, knows_access: bool) -> Self {
        let line = |(label, text): &(&str, String)| Line { label: (*label).to_owned(), text: text.clone() };
        Self {
            path: text(&layer.path),
            format: layer.format.to_string(),
            subformat: layer.facts.subformat.map(str::to_owned),
            virtual_size_bytes: layer.virtual_bytes,
            file_bytes: layer.file_bytes,
            used_bytes: None,
            needs_page_cache: knows_access.then_some(!layer.direct),
            facts: record(&layer.facts.values),
            lines: layer.facts.lines.iter().map(line).collect(),
        }
    }
}

/// The layers of a map, by the files that hold their data, the leaf first.
pub fn map_layers<S: Store>(images: &[Arc<GraphLayer<S>>]) -> Vec<MapLayer> {
    let path = |image: &Arc<GraphLayer<S>>| match std::ptr::eq(image.image().store(), image.image().data_store()) {
        true => text(image.path()),
        false => text(image.image().data_store().path()),
    };
    images.iter().enumerate().map(|(depth, image)| MapLayer { depth, path: path(image) }).collect()
}

impl From<PlacedRun> for Run {
    fn from(PlacedRun { status, offset }: PlacedRun) -> Self {
        let kind = match status.kind {
            ExtentKind::Data => RunKind::Data,
            ExtentKind::Zero => RunKind::Zero,
            ExtentKind::Hole => RunKind::Hole,
        };
        Self {
            offset_bytes: status.extent.start(),
            len_bytes: status.extent.len_bytes,
            kind,
            depth: (kind != RunKind::Hole).then_some(status.depth),
            file_offset_bytes: offset.map(|offset| offset.0),
        }
    }
}

impl Run {
    /// True when `next`, which begins where this run ends, is a part of the same run.
    pub fn is_followed_by(&self, next: &Self) -> bool {
        let goes_on = self.file_offset_bytes.map(|at| at + self.len_bytes) == next.file_offset_bytes;
        goes_on && (self.kind, self.depth) == (next.kind, next.depth)
    }
}

/// A path as JSON has it. Bytes that are not UTF-8 are replaced, because JSON has no other strings.
fn text(path: &Path) -> String {
    path.display().to_string()
}

/// The schema of [`Image::facts`]: which names there are depends on the format.
fn facts_schema() -> Schema {
    let plain = [Type::Null, Type::Boolean, Type::Integer, Type::String];
    let plain = ObjectBuilder::new().schema_type(SchemaType::from_iter(plain)).build();
    let record = |value: RefOr<Schema>| {
        let any = AdditionalProperties::RefOr(value);
        ObjectBuilder::new().schema_type(Type::Object).additional_properties(Some(any))
    };
    let list = ArrayBuilder::new().items(record(plain.clone().into()));
    let mut value = AnyOf::new();
    value.items = vec![plain.into(), list.into()];
    record(Schema::AnyOf(value).into()).description(Some("What only the format knows, by name.")).into()
}

fn record(record: &Record) -> Map<String, Json> {
    record.iter().map(|(name, value)| ((*name).to_owned(), json(value))).collect()
}

fn json(value: &Value) -> Json {
    match value {
        Value::None => Json::Null,
        Value::Bool(value) => (*value).into(),
        Value::Number(value) => (*value).into(),
        Value::Text(value) => value.as_str().into(),
        Value::List(records) => records.iter().map(self::record).collect(),
    }
}
