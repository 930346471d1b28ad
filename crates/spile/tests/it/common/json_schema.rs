//! As much of JSON Schema 2020-12 as Spile's schemas use, and stricter: a key that the schema does not name is a mistake. A keyword that is not
//! known here ends the test, so that none is passed over.

use std::collections::BTreeSet;

use serde_json::Value;

/// What of `value` does not fit the schema.
pub fn mistakes(schema: &Value, value: &Value) -> Vec<String> {
    let mut wrong = Vec::new();
    Look { root: schema, wrong: &mut wrong }.at("", schema, value);
    wrong
}

struct Look<'a> {
    /// What references point into.
    root: &'a Value,
    wrong: &'a mut Vec<String>,
}

impl Look<'_> {
    /// Looks at the value at `place`, all of whose keys the schema must name.
    fn at(&mut self, place: &str, schema: &Value, value: &Value) {
        let named = self.keywords(place, schema, value);
        let keys = value.as_object().into_iter().flat_map(|fields| fields.keys());
        self.wrong.extend(keys.filter(|key| !named.contains(*key)).map(|key| format!("{place}/{key} is not named")));
    }

    /// The same, but the schema may be a part of one. Returns the keys that it names.
    fn keywords(&mut self, place: &str, schema: &Value, value: &Value) -> BTreeSet<String> {
        let mut named = BTreeSet::new();
        for (keyword, rule) in schema.as_object().unwrap_or_else(|| panic!("{place}: no schema: {schema}")) {
            match keyword.as_str() {
                "$schema" | "$defs" | "components" | "description" | "format" | "title" => {}
                "$ref" => {
                    let pointer = rule.as_str().and_then(|to| to.strip_prefix('#')).expect("a pointer");
                    let part = self.root.pointer(pointer).unwrap_or_else(|| panic!("{pointer} points nowhere"));
                    named.extend(self.keywords(place, part, value));
                }
                "allOf" => list(rule).for_each(|part| named.extend(self.keywords(place, part, value))),
                "oneOf" | "anyOf" => {
                    self.one_of(place, rule, value);
                    named.extend(keys(value));
                }
                "properties" => {
                    let parts = rule.as_object().expect("properties");
                    for (key, part) in parts {
                        value.get(key).into_iter().for_each(|inner| self.at(&format!("{place}/{key}"), part, inner));
                    }
                    named.extend(parts.keys().cloned());
                }
                "additionalProperties" if rule == false => {}
                "additionalProperties" => {
                    let others = keys(value).filter(|key| schema["properties"].get(key).is_none());
                    for key in others.collect::<Vec<_>>() {
                        self.at(&format!("{place}/{key}"), rule, &value[&key]);
                        named.insert(key);
                    }
                }
                "propertyNames" => {
                    let names = keys(value).map(Value::from);
                    names.for_each(|name| self.at(&format!("{place}, the key {name}"), rule, &name));
                }
                "items" => {
                    let inner = value.as_array().into_iter().flatten().enumerate();
                    inner.for_each(|(number, inner)| self.at(&format!("{place}/{number}"), rule, inner));
                }
                "required" => {
                    let missing =
                        list(rule).filter(|key| value.is_object() && value.get(key.as_str().unwrap()).is_none());
                    self.wrong.extend(missing.map(|key| format!("{place} has no {key}")));
                }
                "type" => self.demand(place, has_type(rule, value), rule, value),
                "enum" => self.demand(place, list(rule).any(|one| one == value), rule, value),
                "minimum" => self.demand(place, value.as_f64() >= rule.as_f64() || !value.is_number(), rule, value),
                other => panic!("{place}: the keyword {other} is not known"),
            }
        }
        named
    }

    fn one_of(&mut self, place: &str, rule: &Value, value: &Value) {
        let mut each = list(rule).map(|part| {
            let mut wrong = Vec::new();
            Look { root: self.root, wrong: &mut wrong }.at(place, part, value);
            wrong
        });
        if !each.any(|wrong| wrong.is_empty()) {
            self.wrong.push(format!("{place} is none of what it may be: {value}"));
        }
    }

    fn demand(&mut self, place: &str, fits: bool, rule: &Value, value: &Value) {
        if !fits {
            self.wrong.push(format!("{place} should be {rule}: {value}"));
        }
    }
}

fn list(rule: &Value) -> impl Iterator<Item = &Value> {
    rule.as_array().expect("a list").iter()
}

fn keys(value: &Value) -> impl Iterator<Item = String> {
    value.as_object().into_iter().flat_map(|fields| fields.keys().cloned())
}

fn has_type(rule: &Value, value: &Value) -> bool {
    let types = rule.as_array().map_or_else(|| vec![rule], |types| types.iter().collect());
    types.into_iter().any(|name| match name.as_str().expect("a type") {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("there is no type {other}"),
    })
}
