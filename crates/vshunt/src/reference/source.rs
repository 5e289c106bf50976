//! Structs and enums of serde, read from their source: names in JSON, types, docstrings.

use std::collections::BTreeMap;
use std::path::Path;

use syn::{Attribute, Expr, Fields, Item, Lit, Meta, Type};

/// A member of an object.
#[derive(Clone, Debug)]
pub(super) struct Member {
    /// Its name in JSON.
    pub(super) name: String,
    /// Its type in words, as Markdown.
    pub(super) kind: String,
    pub(super) optional: bool,
    pub(super) about: String,
}

enum Shape {
    /// A struct: its members, and the structs whose members belong to it (`flatten`).
    Object { members: Vec<(Member, Type)>, flattened: Vec<String> },
    /// An enum: the words and their docstrings.
    Words(Vec<(String, String)>),
    /// A type that is written as a string, or in several ways.
    Other,
}

struct Thing {
    about: String,
    shape: Shape,
}

/// All structs and enums of some files.
#[derive(Default)]
pub(super) struct Source(BTreeMap<String, Thing>);

impl Source {
    /// Adds the items of a file of this workspace. `prefix` is put before their names.
    pub(super) fn add(&mut self, root: &Path, path: &str, prefix: &str) {
        let text = std::fs::read_to_string(root.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
        for item in syn::parse_file(&text).unwrap_or_else(|e| panic!("{path}: {e}")).items {
            let (name, thing) = match item {
                Item::Struct(item) => (item.ident.to_string(), object(&item)),
                Item::Enum(item) => (item.ident.to_string(), words(&item)),
                _ => continue,
            };
            self.0.insert(format!("{prefix}{name}"), thing);
        }
    }

    fn thing(&self, name: &str) -> &Thing {
        self.0.get(name).unwrap_or_else(|| panic!("no struct or enum {name}: is its file in reference.rs?"))
    }

    /// Returns the docstring of a struct or enum.
    pub(super) fn about(&self, name: &str) -> &str {
        &self.thing(name).about
    }

    /// Returns the members of a struct. Types of the same file are looked up with the prefix of
    /// `name` first.
    pub(super) fn members(&self, name: &str) -> Vec<Member> {
        let prefix = name.rsplit_once("::").map_or(String::new(), |(file, _)| format!("{file}::"));
        let Shape::Object { members, flattened } = &self.thing(name).shape else {
            panic!("{name} is no struct")
        };
        let mut all: Vec<Member> = flattened.iter().flat_map(|name| self.members(name)).collect();
        for (member, ty) in members {
            let (kind, words) = self.kind(ty, &prefix);
            let mut about = member.about.clone();
            // The docstring of the member may explain the words already.
            let said = words.iter().filter(|(word, _)| about.contains(&format!("`{word}`"))).count() > 1;
            for (word, meaning) in words.iter().filter(|(_, meaning)| !said && !meaning.is_empty()) {
                about.push_str(&format!(" `{word}`: {}", lower(meaning)));
            }
            // A member that another struct also has, with less information.
            all.retain(|m| m.name != member.name);
            all.push(Member { kind, about, ..member.clone() });
        }
        all
    }

    /// Returns a type in words, and the words of an enum.
    fn kind(&self, ty: &Type, prefix: &str) -> (String, Vec<(String, String)>) {
        if let Type::Tuple(_) = ty {
            return ("pair".to_owned(), Vec::new());
        }
        let Type::Path(path) = ty else { panic!("a type that is no path") };
        let last = path.path.segments.last().expect("a path has segments");
        let inner = match &last.arguments {
            syn::PathArguments::AngleBracketed(list) => list.args.iter().find_map(|a| match a {
                syn::GenericArgument::Type(ty) => Some(self.kind(ty, prefix)),
                _ => None,
            }),
            _ => None,
        };
        let name = last.ident.to_string();
        let plain = |kind: &str| (kind.to_owned(), Vec::new());
        match name.as_str() {
            "Option" | "Box" | "Spanned" => inner.expect("an argument"),
            "Vec" => {
                let (kind, words) = inner.expect("an argument");
                (format!("list of {}s", kind.replace(" or", "s or")), words)
            }
            "String" | "PathBuf" | "Mac" | "SocketMode" | "QueueNames" | "Vlans" | "Mode" | "Address"
            | "ListenAddress" | "Burst"
                if self.is_text(&name, prefix) =>
            {
                plain("string")
            }
            "bool" => plain("boolean"),
            "u8" | "u16" | "u32" | "u64" | "usize" | "i32" | "i64" | "RawFd" => plain("integer"),
            "Value" => plain("any"),
            "Table" | "Section" => plain("table"),
            "Control" => plain("string or `false`"),
            // It also may be a number of workers.
            "Workers" => plain("string or integer"),
            // The file of a node: its name, or the node itself.
            "Child" => plain("string or object"),
            "Source" => plain("string or object"),
            "NetDrops" => plain("object, see [drop reasons](#drop-reasons)"),
            _ => {
                let local = format!("{prefix}{name}");
                let full = if self.0.contains_key(&local) { local } else { name };
                match &self.thing(&full).shape {
                    Shape::Words(words) => {
                        let shown: Vec<_> = words.iter().map(|(word, _)| format!("`{word}`")).collect();
                        (shown.join(", "), words.clone())
                    }
                    Shape::Object { .. } if full.contains("::") => plain("object"),
                    Shape::Object { .. } => plain(&format!("object ([{full}](#{}))", full.to_lowercase())),
                    Shape::Other => plain("string"),
                }
            }
        }
    }

    /// Returns whether a type is written as text, and is not an enum of the same name.
    fn is_text(&self, name: &str, prefix: &str) -> bool {
        self.0.get(&format!("{prefix}{name}")).is_none_or(|thing| !matches!(thing.shape, Shape::Words(_)))
    }
}

fn lower(text: &str) -> String {
    let mut chars = text.chars();
    let second_is_upper = text.chars().nth(1).is_some_and(|c| c.is_uppercase() || c == '_');
    match chars.next() {
        Some(first) if !second_is_upper => first.to_lowercase().chain(chars).collect(),
        _ => text.to_owned(),
    }
}

/// Returns the docstring as one line of Markdown, without links of rustdoc.
fn about(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter_map(|a| match &a.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
            Expr::Lit(literal) => match &literal.lit {
                Lit::Str(text) => Some(text.value().trim().to_owned()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    });
    lines.collect::<Vec<_>>().join(" ").replace("[`", "`").replace("`]", "`")
}

/// The content of `#[serde(…)]`.
#[derive(Default)]
struct Serde {
    rename: Option<String>,
    rename_all: Option<String>,
    default: bool,
    flatten: bool,
    untagged: bool,
    /// It is not sent.
    skip: bool,
}

fn serde(attributes: &[Attribute]) -> Serde {
    let mut said = Serde::default();
    for attribute in attributes.iter().filter(|a| a.path().is_ident("serde")) {
        attribute
            .parse_nested_meta(|meta| {
                let word = meta.path.get_ident().map(ToString::to_string).unwrap_or_default();
                let text = match meta.value() {
                    Ok(value) => Some(value.parse::<syn::LitStr>()?.value()),
                    Err(_) => None,
                };
                match word.as_str() {
                    "rename" => said.rename = text,
                    "rename_all" => said.rename_all = text,
                    "default" => said.default = true,
                    "flatten" => said.flatten = true,
                    "untagged" => said.untagged = true,
                    "skip" => said.skip = true,
                    _ => {}
                }
                Ok(())
            })
            .unwrap_or_else(|e| panic!("a serde attribute: {e}"));
    }
    said
}

fn object(item: &syn::ItemStruct) -> Thing {
    let thing = |shape| Thing { about: about(&item.attrs), shape };
    let Fields::Named(fields) = &item.fields else { return thing(Shape::Other) };
    let kebab = serde(&item.attrs).rename_all.as_deref() == Some("kebab-case");
    let (mut members, mut flattened) = (Vec::new(), Vec::new());
    for field in &fields.named {
        let said = serde(&field.attrs);
        if said.skip {
            continue;
        }
        let ident = field.ident.as_ref().map(ToString::to_string).unwrap_or_default();
        let optional = said.default || is_option(&field.ty);
        if said.flatten {
            let Type::Path(path) = &field.ty else { panic!("{ident} is flattened") };
            flattened.push(path.path.segments.last().map(|s| s.ident.to_string()).unwrap_or_default());
            continue;
        }
        let name = said.rename.unwrap_or_else(|| if kebab { ident.replace('_', "-") } else { ident });
        let member = Member { name, kind: String::new(), optional, about: about(&field.attrs) };
        members.push((member, field.ty.clone()));
    }
    thing(Shape::Object { members, flattened })
}

fn is_option(ty: &Type) -> bool {
    matches!(ty, Type::Path(path) if path.path.segments.last().is_some_and(|s| s.ident == "Option"))
}

fn words(item: &syn::ItemEnum) -> Thing {
    let said = serde(&item.attrs);
    let thing = |shape| Thing { about: about(&item.attrs), shape };
    if said.untagged || item.variants.iter().any(|v| !matches!(v.fields, Fields::Unit)) {
        return thing(Shape::Other);
    }
    let word = |variant: &syn::Variant| {
        let ident = variant.ident.to_string();
        let name = serde(&variant.attrs).rename.unwrap_or_else(|| match said.rename_all.as_deref() {
            Some("lowercase") => ident.to_lowercase(),
            Some("kebab-case") => kebab(&ident),
            _ => ident,
        });
        (name, about(&variant.attrs))
    };
    thing(Shape::Words(item.variants.iter().map(word).collect()))
}

/// Converts `PerQueue` to `per-queue`.
fn kebab(ident: &str) -> String {
    let mut out = String::new();
    for (at, c) in ident.chars().enumerate() {
        if c.is_uppercase() && at > 0 {
            out.push('-');
        }
        out.extend(c.to_lowercase());
    }
    out
}
