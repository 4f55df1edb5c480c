//! What enumerations with names, and types with secrets, have alike.

/// An enumeration with `ALL` its values in their order, each at the position `self as usize`, and the `name` of each,
/// as which it is displayed.
#[macro_export]
macro_rules! named_values {
    ($(#[$meta:meta])* $vis:vis enum $type:ident { $($(#[$doc:meta])* $value:ident = $name:literal,)+ }) => {
        $(#[$meta])*
        $vis enum $type { $($(#[$doc])* $value,)+ }

        impl $type {
            /// In the order of their declaration.
            $vis const ALL: [Self; [$($name),+].len()] = [$(Self::$value),+];

            /// The name of the value.
            $vis fn name(self) -> &'static str {
                match self { $(Self::$value => $name,)+ }
            }
        }

        impl ::std::fmt::Display for $type {
            fn fmt(&self, out: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                out.pad(self.name())
            }
        }
    };
}

/// A `Debug` of these fields only: the others are secrets, or say nothing.
#[macro_export]
macro_rules! debug_only {
    ($type:ident { $($field:ident),+ }) => {
        impl ::std::fmt::Debug for $type {
            fn fmt(&self, out: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                out.debug_struct(stringify!($type))$(.field(stringify!($field), &self.$field))+.finish_non_exhaustive()
            }
        }
    };
}
